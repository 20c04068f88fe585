/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_table.c - every finding of a check: its id, how bad it is, whether a repair takes care of it, what comes of it
 * and what to do. docs/check.md says when each is found.
 */
#include <stdarg.h>
#include <stdio.h>

#include "check/check.h"

static const char *const severities[NIB_SEVERITY_COUNT] = { "error", "warning", "hint" };

const char *nib_severity_name(nib_severity severity)
{
    return (unsigned)severity < NIB_SEVERITY_COUNT ? severities[severity] : NULL;
}

struct fault_facts {
    const char *id;
    nib_severity severity;
    bool repairable;
    const char *consequence, *remedy;
};

#define ERROR NIB_SEVERITY_ERROR
#define WARNING NIB_SEVERITY_WARNING
#define HINT NIB_SEVERITY_HINT
#define CONVERT "make the file again from the original with nib quantize or convert_hf_to_gguf.py"
#define REPAIR "run nib repair"
#define BY_HAND "mend it by hand, or quantize the original again: nib repair cannot write this one"
#define AGAIN "quantize the original again"

static const struct fault_facts faults[NIB_FAULTS] = {
    [NIB_FAULT_SCALE_MISSING] = { "scale-missing", ERROR, 0,
                                  "loaders reject the module or leave its scales uninitialized", AGAIN },
    [NIB_FAULT_TENSOR_SCALE_MISSING] = { "tensor-scale-missing", ERROR, 0,
                                         "loaders compute with uninitialized memory or with 1", AGAIN },
    [NIB_FAULT_INPUT_MISSING] = { "input-scale-missing", ERROR, 1,
                                  "vLLM computes with uninitialized memory or 1/0, and gives NaN for some prompts",
                                  REPAIR },
    [NIB_FAULT_CODES_MISSING] = { "codes-missing", ERROR, 0, "loaders leave the weight uninitialized", AGAIN },
    [NIB_FAULT_CODES_SHAPE] = { "codes-shape", ERROR, 0, "loaders want U8 [N, K/2] and reject the module", AGAIN },
    [NIB_FAULT_CODES_COLUMNS] = { "inner-size", ERROR, 0, "loaders reject rows that are no whole blocks of 16",
                                  "keep the module in high precision" },
    [NIB_FAULT_SCALE_DTYPE] = { "scale-dtype", ERROR, 0,
                                "loaders want F8_E4M3 and reject the module or misread the bytes", AGAIN },
    [NIB_FAULT_SCALE_FLAT] = { "scale-flat", ERROR, 0,
                               "it is the dump of a runtime, most likely swizzled: loaders reject it or compute "
                               "garbage",
                               AGAIN },
    [NIB_FAULT_SCALE_PADDED] = { "scale-padded", ERROR, 0,
                                 "it is the dump of a runtime, most likely swizzled: loaders reject it or compute "
                                 "garbage",
                                 AGAIN },
    [NIB_FAULT_SCALE_PADDING] = { "scale-padding", ERROR, 0,
                                  "it is the dump of a runtime, and what pads it was never initialized: kernels that "
                                  "read it slow down and give garbage",
                                  AGAIN },
    [NIB_FAULT_GROUP_SIZE] = { "group-size", ERROR, 0,
                               "NVFP4 has blocks of 16: loaders reject the module or scale it wrongly", AGAIN },
    [NIB_FAULT_SCALE_SHAPE] = { "scale-shape", ERROR, 0, "loaders reject the module or read another block's scale",
                                AGAIN },
    [NIB_FAULT_TENSOR_SCALE_SHAPE] = { "tensor-scale-shape", ERROR, 0, "loaders want one F32 and reject the module",
                                       AGAIN },
    [NIB_FAULT_MISNAMED] = { "companion-misnamed", ERROR, 0,
                             "loaders of this format drop it without a word and compute garbage",
                             "convert the checkpoint with nib convert, or rename the tensor" },
    [NIB_FAULT_STRAY] = { "companion-stray", WARNING, 0, "strict loaders reject tensors that no module takes",
                          "remove it, or quantize the weight" },
    [NIB_FAULT_PRE_QUANT_SCALE] = { "pre-quant-scale", WARNING, 0,
                                    "the weight is only right where activations are multiplied by it, which most "
                                    "loaders do not do",
                                    "fold it into the layer before, or " AGAIN },
    [NIB_FAULT_WRAPPED_NAME] = { "name-wrapped", ERROR, 0,
                                 "no loader knows the module by this name: it is dropped or rejected",
                                 "save the model without its wrapper" },
    [NIB_FAULT_GGUF_KEY] = { "gguf-key-missing", ERROR, 0, "llama.cpp cannot build the model without it", CONVERT },
    [NIB_FAULT_GGUF_TENSOR] = { "gguf-tensor-missing", ERROR, 0, "llama.cpp rejects the file", CONVERT },
    [NIB_FAULT_GGUF_TOKENIZER] = { "gguf-tokenizer", ERROR, 0,
                                   "llama.cpp cannot turn text into tokens, or rejects the file", CONVERT },
    [NIB_FAULT_GGUF_SCALE_IGNORED] = { "gguf-scale-ignored", ERROR, 0,
                                       "llama.cpp multiplies without it there and computes garbage",
                                       "keep the weight: nib quantize does" },
    [NIB_FAULT_TENSOR_SCALE_NOT_FINITE] = { "tensor-scale-not-finite", ERROR, 0, "the layer gives NaN or zeros",
                                            AGAIN },
    [NIB_FAULT_TENSOR_SCALE_NOT_POSITIVE] = { "tensor-scale-not-positive", ERROR, 0,
                                              "the layer gives zeros, infinities or the wrong sign", AGAIN },
    [NIB_FAULT_INPUT_NOT_FINITE] = { "input-scale-not-finite", ERROR, 1,
                                     "the layer gives NaN for every prompt that reaches it", REPAIR },
    [NIB_FAULT_INPUT_NOT_POSITIVE] = { "input-scale-not-positive", ERROR, 1, "1/0 is infinite: the layer gives NaN",
                                       REPAIR },
    [NIB_FAULT_SCALE_NAN] = { "scale-nan", ERROR, 0, "blocks decode to NaN", AGAIN },
    [NIB_FAULT_SCALE_ALL_NAN] = { "scale-all-nan", ERROR, 1,
                                  "it is what ModelOpt writes for a weight of zeros; kernels multiply 0 by NaN and the "
                                  "layer gives NaN",
                                  REPAIR },
    [NIB_FAULT_SCALE_NEGATIVE] = { "scale-negative", ERROR, 0,
                                   "kernels take scales for unsigned: the blocks have the wrong size or sign", AGAIN },
    [NIB_FAULT_SCALE_ZERO] = { "scale-zero", WARNING, 0, "values that were not zero decode to zero", AGAIN },
    [NIB_FAULT_SCALE_SUBNORMAL] = { "scale-subnormal", WARNING, 0, "vLLM's Marlin kernel takes these blocks for zero",
                                    "quantize the original again with scales of at least 2^-6" },
    [NIB_FAULT_SCALE_SUBNORMAL_FEW] = { "scale-subnormal-few", HINT, 0,
                                        "vLLM's Marlin kernel takes these blocks for zero, which for so few small ones "
                                        "may not matter",
                                        "quantize the original again with scales of at least 2^-6" },
    [NIB_FAULT_SCALE_RANGE] = { "scale-range", WARNING, 0,
                                "the tensor scale is larger than it need be, and small blocks lose precision or "
                                "vanish",
                                AGAIN },
    [NIB_FAULT_TENSOR_SCALE_INVERTED] = { "tensor-scale-inverted", ERROR, 1,
                                          "weights come out wrong by the square of it", REPAIR },
    [NIB_FAULT_INPUT_INVERTED] = { "input-scale-inverted", ERROR, 1, "activations underflow to zero or are clipped",
                                   REPAIR },
    [NIB_FAULT_FUSED_TENSOR_SCALES] = { "fused-scales-differ", ERROR, 1,
                                        "vLLM and SGLang fuse these and use one of the two for both, TensorRT-LLM "
                                        "rejects",
                                        REPAIR },
    [NIB_FAULT_FUSED_INPUTS] = { "fused-input-scales-differ", ERROR, 1,
                                 "vLLM and SGLang fuse these and use one of the two for both, TensorRT-LLM rejects",
                                 REPAIR },
    [NIB_FAULT_FUSED_PARTLY] = { "fused-partly", ERROR, 0,
                                 "vLLM fuses these and rejects a layer of which only a part is quantized",
                                 "quantize all of them or none" },
    [NIB_FAULT_CONFIG_ABSENT] = { "config-absent", HINT, 0, "servers do not know what model it is",
                                  "put the model's config.json beside it" },
    [NIB_FAULT_CONFIG_MISSING] = { "config-missing", ERROR, 1,
                                   "servers take the weights for unquantized ones and reject their shapes", REPAIR },
    [NIB_FAULT_CONFIG_METHOD] = { "config-method", ERROR, 1,
                                  "loaders look for tensors by other names, and may take the scale for its inverse",
                                  REPAIR },
    [NIB_FAULT_CONFIG_FORMAT] = { "config-format", ERROR, 1, "loaders take the packed weights for something else",
                                  REPAIR },
    [NIB_FAULT_CONFIG_STATUS] = { "config-status", WARNING, 1,
                                  "transformers builds unpacked modules and rejects the tensors", REPAIR },
    [NIB_FAULT_CONFIG_SCHEME] = { "config-scheme", ERROR, 1, "loaders build another kind of layer, or reject", REPAIR },
    [NIB_FAULT_CONFIG_DTYPE_KEYS] = { "config-dtype-keys", WARNING, 1,
                                      "vLLM before 0.14 rejects the key; what it says is the default", REPAIR },
    [NIB_FAULT_CONFIG_PATTERN] = { "config-pattern", ERROR, 1, "loaders reject the configuration", REPAIR },
    [NIB_FAULT_CONFIG_GLOB] = { "config-glob", WARNING, 1,
                                "compressed-tensors takes it literally, and it matches nothing", REPAIR },
    [NIB_FAULT_CONFIG_IGNORED] = { "config-ignored", ERROR, 1,
                                   "loaders build an unquantized layer and reject its tensors", REPAIR },
    [NIB_FAULT_CONFIG_NOT_IGNORED] = { "config-not-ignored", ERROR, 1,
                                       "loaders build a packed layer, and it is left uninitialized", REPAIR },
    [NIB_FAULT_CONFIG_TOO_WIDE] = { "config-too-wide", WARNING, 1,
                                    "vLLM looks for it anywhere in a name and leaves that layer unquantized", REPAIR },
    [NIB_FAULT_CONFIG_LISTED] = { "config-listed", ERROR, 1,
                                  "loaders build a packed layer, and it is left uninitialized", REPAIR },
    [NIB_FAULT_CONFIG_MIXTURE] = { "config-mixture", ERROR, 0,
                                   "loaders build a layer of another format and reject its tensors, or misread them",
                                   "mend the configuration, or quantize the original again" },
    [NIB_FAULT_FP8_SCALE_MISSING] = { "fp8-scale-missing", ERROR, 0,
                                      "loaders reject the module or leave its scales uninitialized", AGAIN },
    [NIB_FAULT_FP8_SCALE_DTYPE] = { "fp8-scale-dtype", ERROR, 0, "loaders want values, and misread or reject it",
                                    AGAIN },
    [NIB_FAULT_FP8_SCALE_SHAPE] = { "fp8-scale-shape", ERROR, 0, "loaders want one for each row, or one for all",
                                    AGAIN },
    [NIB_FAULT_FP8_SCALE_VALUE] = { "fp8-scale-value", ERROR, 0, "the row is lost", AGAIN },
    [NIB_FAULT_FP8_NAN] = { "fp8-nan", ERROR, 0, "everything behind it is NaN", AGAIN },
    [NIB_FAULT_CONFIG_UNLISTED] = { "config-unlisted", ERROR, 1,
                                    "loaders build an unquantized layer and reject its tensors", REPAIR },
    [NIB_FAULT_HF_MISSING] = { "hf-config-missing", WARNING, 1,
                               "TensorRT-LLM and older loaders read only that file, and take the model for unquantized",
                               REPAIR },
    [NIB_FAULT_HF_KEYS] = { "hf-config-keys", ERROR, 1, "vLLM rejects the file", REPAIR },
    [NIB_FAULT_HF_DIFFERS] = { "hf-config-differs", WARNING, 1,
                               "vLLM and SGLang believe config.json, TensorRT-LLM the other", REPAIR },
    [NIB_FAULT_HEAD_QUANTIZED] = { "head-quantized", WARNING, 0,
                                   "older loaders reject a quantized head, and it costs accuracy",
                                   "keep it in high precision" },
    [NIB_FAULT_HEAD_TIED] = { "head-tied", ERROR, 0, "config.json ties it to the embedding: loaders drop it or reject",
                              "keep the head out, or set tie_word_embeddings to false" },
    [NIB_FAULT_HEAD_NOT_IGNORED] = { "head-not-ignored", WARNING, 1,
                                     "transformers builds a packed head that no tensor fills", REPAIR },
    [NIB_FAULT_ROUTER_QUANTIZED] = { "router-quantized", ERROR, 0,
                                     "loaders build routers unquantized and reject their tensors",
                                     "keep it in high precision" },
    [NIB_FAULT_EMBEDDING_QUANTIZED] = { "embedding-quantized", ERROR, 0,
                                        "loaders look rows of it up and cannot unpack them",
                                        "keep it in high precision" },
    [NIB_FAULT_METADATA] = { "metadata-format", WARNING, 1,
                             "transformers before 4.50 fails on a file that does not say \"format\": \"pt\"", REPAIR },
    [NIB_FAULT_STALE_SHARD] = { "stale-shard", WARNING, 1,
                                "loaders that take every file of the directory mix its tensors with the others",
                                "remove the file, or run nib repair" },
    [NIB_FAULT_UNINDEXED] = { "unindexed-tensor", WARNING, 1, "loaders that go by the index do not see it", REPAIR },
    [NIB_FAULT_REPEATED] = { "repeated-tensor", WARNING, 1, "which of them is loaded depends on the loader",
                             "remove the file that is not meant, or run nib repair" },
    [NIB_FAULT_ORIENTATION] = { "open-orientation", WARNING, 0, "what is a row of the matrix cannot be told",
                                "complete config.json" },
    [NIB_FAULT_UNREADABLE] = { "unreadable", ERROR, 0, "it cannot be read as a weight", AGAIN },
    [NIB_FAULT_NIBBLES_SWAPPED] = { "nibbles-swapped", ERROR, 0,
                                    "every two values change places: the layer computes garbage", AGAIN },
    [NIB_FAULT_SCALES_SWIZZLED] = { "scales-swizzled", ERROR, 0, "loaders want rows of scales and use another block's",
                                    AGAIN },
    [NIB_FAULT_TENSOR_SCALE_WRONG] = { "tensor-scale-wrong", ERROR, 0, "the layer is off by that factor", AGAIN },
    [NIB_FAULT_DIFFERS] = { "differs-from-original", ERROR, 0, "it is no quantization of that weight", AGAIN },
    [NIB_FAULT_KEPT_DIFFERS] = { "kept-differs", WARNING, 0, "a weight that was kept is not the original's",
                                 "see whether the two belong together" },
    [NIB_FAULT_WEIGHT_ABSENT] = { "weight-absent", ERROR, 0, "the original has it", AGAIN },
    [NIB_FAULT_WEIGHT_SHAPE] = { "weight-shape", ERROR, 0, "it is not the original's weight",
                                 "see whether the two belong together" },
    [NIB_FAULT_MAYBE_SWIZZLED] = { "maybe-swizzled", HINT, 0,
                                   "loaders want rows of scales and would use another block's",
                                   "compare with --against the original" },
    [NIB_FAULT_MAYBE_SWAPPED] = { "maybe-swapped", HINT, 0, "every two values may have changed places",
                                  "compare with --against the original" },
};

const char *nib_check_id(enum nib_fault fault) { return faults[fault].id; }

static bool is_of_configuration(enum nib_fault fault)
{
    return fault >= NIB_FAULT_CONFIG_ABSENT && fault <= NIB_FAULT_EMBEDDING_QUANTIZED;
}

__attribute__((format(printf, 5, 0))) static nib_status tell(struct nib_checking *k, enum nib_fault fault,
                                                             bool repairable, const char *tensor, const char *format,
                                                             va_list arguments)
{
    char fact[1024];
    vsnprintf(fact, sizeof fact, format, arguments);
    const struct fault_facts *facts = &faults[fault];
    k->found++;
    const nib_finding finding = { .bytes = sizeof finding,
                                  .severity = facts->severity,
                                  .id = facts->id,
                                  .tensor = *tensor ? tensor : "\"\"", /* a list of names may hold an empty one */
                                  .fact = fact,
                                  .consequence = facts->consequence,
                                  .remedy = facts->repairable && !repairable ? BY_HAND : facts->remedy,
                                  .repairable = facts->repairable && repairable };
    if (k->each(k->context, &finding))
        return nib_fail(NIB_ERR_CANCELLED, "checking: stopped by the caller");
    return NIB_OK;
}

nib_status nib_check_found(struct nib_checking *k, enum nib_fault fault, const char *tensor, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const nib_status status = tell(k, fault, k->uniform || !is_of_configuration(fault), tensor, format, arguments);
    va_end(arguments);
    return status;
}

nib_status nib_check_found_in(struct nib_checking *k, uint32_t codes, enum nib_fault fault, const char *tensor,
                              const char *format, ...)
{
    const uint32_t weight = k->c->tensors[codes].weight;
    va_list arguments;
    va_start(arguments, format);
    const nib_status status =
        tell(k, fault, weight != NIB_NONE && nib_check_is_writable(k, weight), tensor, format, arguments);
    va_end(arguments);
    return status;
}
