/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gemm.c - products of quantized tensors and plain arrays: what is accepted, and what is handed to the device.
 *
 * No call follows a pointer into an operand here; src/tensor/product.c is the host's side of the seam, and the formulas
 * are those of src/kernels/scalar/product_scalar.c.
 */
#include "nib_reference.h"
#include "tensor/product.h"
#include "tensor/tensor.h"

nib_status nib_gemm_options_init_sized(nib_gemm_options *options, size_t bytes)
{
    const nib_gemm_options defaults = { .bytes = sizeof defaults, .alpha = 1 };
    NIB_REQUIRE(options);
    return nib_struct_init("options", options, bytes, &defaults, sizeof defaults, NIB_UP_TO(nib_gemm_options, bias));
}

/* ---- Operands ---- */

static nib_status check_dtype(const char *what, const nib_array *array)
{
    if (array->dtype == NIB_F32 || array->dtype == NIB_BF16 || array->dtype == NIB_F16)
        return NIB_OK;
    return nib_fail(NIB_ERR_DTYPE, "%s is F32, BF16 or F16, not %s", what, nib_dtypes[array->dtype].name);
}

static void *first_of(const nib_array *array) { return array->data ? (char *)array->data + array->offset : NULL; }

static nib_status load_side(const char *what, const nib_operand *operand, struct nib_side *out)
{
    if (!operand->tensor == !operand->array)
        return nib_fail(NIB_ERR_ARG,
                        operand->tensor ? "%s is both a tensor and an array" : "nib_gemm: %s is NULL, tensor and array",
                        what);
    if (operand->array) {
        const nib_array *array = operand->array;
        TRY(nib_check_array(what, array));
        TRY(check_dtype(what, array));
        if (array->rank != 2)
            return nib_fail(NIB_ERR_SHAPE, "%s must be a matrix, and has %d dims", what, (int)array->rank);
        *out = (struct nib_side){ .lines = array->shape[0],
                                  .length = array->shape[1],
                                  .values = first_of(array),
                                  .dtype = array->dtype,
                                  .line_stride = array->strides[0],
                                  .element_stride = array->strides[1] };
        return NIB_OK;
    }
    nib_usage usage;
    const nib_tensor *t = operand->tensor;
    TRY(nib_tensor_pick(t, operand->usage, &usage));
    *out = (struct nib_side){ .lines = t->geometry.usage[usage].lines,
                              .length = t->geometry.usage[usage].length,
                              .q = &t->q,
                              .usage = usage,
                              .geometry = &t->geometry.usage[usage],
                              .memory = nib_tensor_memory(t, usage),
                              .rules = nib_tensor_rules(t) };
    return NIB_OK;
}

static const nib_device *device_of(const nib_operand *operand)
{
    return operand->tensor ? operand->tensor->device : operand->array ? operand->array->device : NULL;
}

/* Whether a side's blocks of 4-bit codes multiply exactly. */
static bool is_exact(const struct nib_side *side) { return side->q && nib_format_of(side->q)->exact_dot; }

static bool has_rht(const struct nib_side *side) { return side->q && nib_usage_has_rht(side->q, side->usage); }

static nib_status choose_kind(struct nib_product *p)
{
    const struct nib_side *a = &p->a, *b = &p->b;
    if (!a->q && !b->q)
        return nib_fail(NIB_ERR_UNSUPPORTED, "both operands are plain: one of them is a tensor");
    if (a->length != b->length)
        return nib_fail(NIB_ERR_MISMATCH, "the inner sizes are %lld and %lld", (long long)a->length,
                        (long long)b->length);
    if (!a->q || !b->q) {
        const struct nib_side *tensor = a->q ? a : b;
        if (has_rht(tensor))
            return nib_fail(NIB_ERR_UNSUPPORTED, "a transformed usage does not go with plain values");
        p->kind =
            is_exact(tensor) && nib_format_of(tensor->q)->scale == NIB_E4M3 ? NIB_PRODUCT_FIXED : NIB_PRODUCT_VALUES;
        return NIB_OK;
    }
    p->kind = NIB_PRODUCT_VALUES;
    if (!is_exact(a) || a->q->format != b->q->format)
        return NIB_OK;
    if (has_rht(a) != has_rht(b) || (has_rht(a) && a->q->rht_sign_mask != b->q->rht_sign_mask))
        return nib_fail(NIB_ERR_MISMATCH,
                        "one operand is transformed along the inner axis and the other is not, or differently");
    p->kind = nib_format_of(a->q)->scale == NIB_E4M3 ? NIB_PRODUCT_NVFP4 : NIB_PRODUCT_MXFP4;
    return NIB_OK;
}

/* ---- Outputs ---- */

static nib_status load_output(const nib_gemm_options *options, const nib_array *y, struct nib_product *p)
{
    nib_gemm_options o = { .bytes = sizeof o, .alpha = 1 };
    if (options)
        TRY(nib_struct_read("options", options, &o, sizeof o, NIB_UP_TO(nib_gemm_options, bias)));
    TRY(nib_check_output("y", y));
    TRY(check_dtype("y", y));
    if (y->rank != 2 || y->shape[0] != p->a.lines || y->shape[1] != p->b.lines)
        return nib_fail(NIB_ERR_SHAPE, "y must be [%lld, %lld]", (long long)p->a.lines, (long long)p->b.lines);
    p->out = (struct nib_product_output){ .y = first_of(y),
                                          .dtype = y->dtype,
                                          .row_stride = y->strides[0],
                                          .col_stride = y->strides[1],
                                          .alpha = o.alpha,
                                          .beta = o.beta };
    if (!o.bias)
        return NIB_OK;
    TRY(nib_check_same_device("the bias", o.bias->device, "y", y->device));
    TRY(nib_check_array("the bias", o.bias));
    TRY(check_dtype("the bias", o.bias));
    if (o.bias->rank != 1 || o.bias->shape[0] != p->b.lines)
        return nib_fail(NIB_ERR_SHAPE, "the bias must be [%lld]", (long long)p->b.lines);
    p->out.bias = first_of(o.bias);
    p->out.bias_dtype = o.bias->dtype;
    p->out.bias_col = o.bias->strides[0];
    return NIB_OK;
}

/* Plain values are rounded on side a: y and the sides are transposed where they are on the other. */
static void transpose(struct nib_product *p)
{
    const struct nib_product old = *p;
    p->a = old.b;
    p->b = old.a;
    p->out.row_stride = old.out.col_stride;
    p->out.col_stride = old.out.row_stride;
    p->out.bias_row = old.out.bias_col;
    p->out.bias_col = old.out.bias_row;
}

nib_status nib_product_load(const nib_operand *a, const nib_operand *b, const nib_gemm_options *options,
                            const nib_array *y, struct nib_product *out)
{
    *out = (struct nib_product){ .kind = NIB_PRODUCT_VALUES };
    TRY(nib_check_same_device("a", device_of(a), "y", y->device));
    TRY(nib_check_same_device("b", device_of(b), "y", y->device));
    TRY(load_side("a", a, &out->a));
    TRY(load_side("b", b, &out->b));
    TRY(choose_kind(out));
    TRY(load_output(options, y, out));
    if (out->kind == NIB_PRODUCT_FIXED && !out->b.q)
        transpose(out);
    return NIB_OK;
}

/* ---- Calls ---- */

nib_status nib_gemm(const nib_operand *a, const nib_operand *b, const nib_gemm_options *options, const nib_array *y)
{
    NIB_REQUIRE(a);
    NIB_REQUIRE(b);
    NIB_REQUIRE(y);
    struct nib_product product;
    TRY(nib_product_load(a, b, options, y, &product));
    nib_device *device = nib_device_of(y->device);
    TRY(NIB_DEVICE_HAS(device, product));
    return device->ops->product(device, &product, 1);
}

nib_status nib_gemm_grouped(const nib_operand *a, const nib_operand *b, const nib_gemm_options *const *options,
                            const nib_array *y, size_t n)
{
    if (!n)
        return NIB_OK;
    NIB_REQUIRE(a);
    NIB_REQUIRE(b);
    NIB_REQUIRE(y);
    nib_device *device = nib_device_of(y->device);
    struct nib_product *products = n <= SIZE_MAX / sizeof *products ? nib_alloc(n * sizeof *products) : NULL;
    if (!products)
        return nib_fail(NIB_ERR_MEMORY, "no memory for %zu products", n);
    nib_status status = NIB_DEVICE_HAS(device, product);
    for (size_t i = 0; i < n && !status; i++) {
        status = nib_check_same_device("an output", y[i].device, "the first", y[0].device);
        if (!status)
            status = nib_product_load(&a[i], &b[i], options ? options[i] : NULL, &y[i], &products[i]);
    }
    if (!status)
        status = device->ops->product(device, products, n);
    nib_free(products);
    return status;
}

nib_status nib_gemm_reference(const nib_operand *a, const nib_operand *b, const nib_gemm_options *options,
                              const nib_array *y)
{
    NIB_REQUIRE(a);
    NIB_REQUIRE(b);
    NIB_REQUIRE(y);
    struct nib_product product;
    TRY(nib_product_load(a, b, options, y, &product));
    TRY(nib_check_host("nib_gemm_reference", y->device));
    return nib_products(nib_device_of(y->device), &nib_kernels_scalar, &product, 1);
}
