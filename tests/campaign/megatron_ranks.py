# SPDX-License-Identifier: Apache-2.0
"""megatron-core 0.19 over nib's aliases, with fp4 parameters and its distributed optimizer: after every step all ranks
have the same weights, and they are those that quantizing the master gives; and a rank that fails ends the others.

    megatron_ranks.py libnib.so DIRECTORY [cpu|cuda]        DIRECTORY holds megatron-core

On the CPU two gloo ranks run it under a shim, since megatron-core knows GPUs alone; on a GPU one rank does, without it.
"""
import contextlib
import datetime
import functools
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LIBRARY, MEGATRON, DEVICE = (*sys.argv[1:], "cpu")[:3]
os.environ["NIB_LIBRARY"] = LIBRARY
sys.path[:0] = [os.path.join(ROOT, "python"), MEGATRON]
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

import nib  # noqa: E402
import nib.torch as nt  # noqa: E402

LAYERS, HIDDEN, HEADS, FFN, VOCABULARY, LENGTH, BATCH, STEPS = 2, 64, 4, 128, 96, 32, 2, 20
RANKS = 2 if DEVICE == "cpu" else 1
TIMEOUT, SLACK = 30, 30  # seconds: of groups whose rank fails, and for what else the others do until then


# ---- The shim --------------------------------------------------------------------------------------------


class AsCuda(torch.overrides.TorchFunctionMode):
    """Tensors that are asked for on "cuda" lie on the CPU, and the names of their types are CUDA's."""

    @staticmethod
    def there(device):
        names = isinstance(device, int) or isinstance(device, str) and device.startswith("cuda")
        return "cpu" if names and not isinstance(device, bool) else device

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = self.there(kwargs["device"])
        if function is torch.Tensor.to:
            args = tuple(self.there(argument) for argument in args)
        if function in (torch.Tensor.cuda, torch.Tensor.record_stream):
            return args[0]
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


class Stream:
    """One that has always come to its end; an event too."""

    def __init__(self, *_args, **_kwargs):
        pass

    def nothing(self, *_args, **_kwargs):
        return None
    wait_stream = wait_event = synchronize = record = wait = record_event = nothing


def install_shim():
    cuda = torch.cuda
    for name in ("synchronize", "empty_cache", "set_device", "_lazy_init", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *_args, **_kwargs: None)
    cuda._lazy_call = lambda function, **_kwargs: function()
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: RANKS
    cuda.is_available = lambda: True
    cuda.get_device_capability = lambda *_args: (10, 0)
    cuda.Stream = cuda.Event = Stream
    cuda.current_stream = cuda.default_stream = Stream
    cuda.stream = cuda.device = lambda *_args: contextlib.nullcontext()
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.manual_seed_all = lambda _seed: None  # torch.manual_seed calls it
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
    cuda.default_generators = (torch.default_generator,)
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor"):
        setattr(cuda, name, getattr(torch, name))
    torch.nn.Module.cuda = lambda self, *_args: self
    AsCuda().__enter__()


class Each:
    """Collectives one after another, where Megatron coalesces them; a handle of those that are not waited for."""
    now = None

    def __init__(self, *_args, **_kwargs):
        self.works = []

    def __enter__(self):
        Each.now = self
        return self

    def __exit__(self, *_):
        Each.now = None

    def wait(self):
        for work in self.works:
            work.wait()

    @staticmethod
    def kept(collective):
        def call(*args, **kwargs):
            work = collective(*args, **kwargs)
            if work is not None and Each.now is not None:
                Each.now.works.append(work)
            return work
        return call


def gather_each():
    """gloo gathers tensors of two dtypes that are coalesced as if they had one, and garbles both (PyTorch 2.13): one
    after another."""
    from megatron.core.distributed import param_and_grad_buffer as buffers
    buffers._coalescing_manager = Each
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(buffers, name, Each.kept(getattr(buffers, name)))


# ---- Training --------------------------------------------------------------------------------------------


def build(timeout, **overlap):
    """The model in DistributedDataParallel, its optimizer, and what its NVFP4 weights were quantized from."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(distributed_timeout_minutes=timeout / 60)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=FFN, fp4="e2m1",
        fp4_recipe="nvfp4", fp4_param=True, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
        hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm", gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, gradient_accumulation_fusion=False)
    model = GPTModel(config, get_gpt_layer_with_transformer_engine_spec(), vocab_size=VOCABULARY,
                     max_sequence_length=LENGTH, position_embedding_type="rope",
                     share_embeddings_and_output_weights=False).cuda()
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True,
                                             fp4_param_gather=True, **overlap)
    ddp = DistributedDataParallel(config, settings, Float16Module(config, model))
    nt.megatron.check_buffers(ddp)
    values = {name: p.get_high_precision_init_val().float() for name, p in ddp.named_parameters()
              if isinstance(p, nt.NVFP4Tensor)}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=3e-3, min_lr=3e-3, weight_decay=0.01, bf16=True,
                        params_dtype=torch.bfloat16, use_distributed_optimizer=True, clip_grad=1.0), [ddp])
    return ddp, getattr(optimizer, "chained_optimizers", [optimizer])[0], values


def step_of(ddp, optimizer, step, rank):
    """The loss of a rank's batch: sequences that go up by one, two or three."""
    from megatron.core.distributed import finalize_model_grads
    data = torch.Generator().manual_seed(RANKS * step + rank)
    first, stride = torch.randint(VOCABULARY, (2, BATCH, 1), generator=data)
    tokens = ((first + (1 + stride % 3) * torch.arange(LENGTH + 1)) % VOCABULARY).to(DEVICE)
    positions = torch.arange(LENGTH, device=DEVICE).expand(BATCH, LENGTH)
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    loss = ddp(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous()).float().mean()
    loss.backward()
    finalize_model_grads([ddp])
    done, _norm, _zeros = optimizer.step()
    assert done
    return loss.item()


def master_of(parameter, optimizer):
    """The FP32 master of a parameter, of which every rank has a shard or nothing."""
    start, shard = None, getattr(parameter, "main_param", None)
    if shard is not None:
        start, shard = optimizer._get_model_param_range_map(parameter)["param"].start, shard.detach().cpu()
    everybodys = [None] * RANKS
    dist.all_gather_object(everybodys, (start, shard))
    whole = torch.full((parameter.numel(),), float("nan"))
    for start, shard in everybodys:
        if shard is not None:
            whole[start:start + shard.numel()] = shard
    assert not whole.isnan().any(), "the ranks' shards are not all of it"
    return whole.view(parameter.shape)


def parts(parameter):
    """What a parameter consists of, by name; all in bytes."""
    if not isinstance(parameter, nt.NVFP4Tensor):
        return {"values": parameter.detach().cpu().view(torch.uint8)}
    fields = {field.name: getattr(parameter, field.name) for field in parameter.FIELDS}
    return {name: part.detach().cpu().contiguous().view(torch.uint8) for name, part in fields.items()
            if part is not None}


def same(some, others):
    return some.keys() == others.keys() and all(torch.equal(part, others[name]) for name, part in some.items())


def check_weights(ddp, optimizer, gathered):
    """Weights of all ranks and what quantizing the master gives; the codes are in Megatron's buffer."""
    buffers = {buffer.param_data.untyped_storage().data_ptr() for buffer in ddp.buffers}
    for name, p in ddp.named_parameters():
        master = master_of(p, optimizer).to(p.device, p.dtype)
        mine = parts(p)
        assert same(mine, parts(p._get_quantizer().copy()(master) if isinstance(p, nt.NVFP4Tensor) else master)), name
        everybodys = [None] * RANKS
        dist.all_gather_object(everybodys, mine)
        assert all(same(mine, others) for others in everybodys), name
        if isinstance(p, nt.NVFP4Tensor):
            assert len(mine) == 6 and p._rowwise_data.untyped_storage().data_ptr() in buffers, name
    codes = sum(p.numel() // 2 for p in ddp.parameters() if isinstance(p, nt.NVFP4Tensor))
    assert codes <= gathered.pop(torch.uint8) <= 1.02 * codes, "of the NVFP4 weights their codes alone are gathered"


def count_gathers():
    """Bytes that Megatron's buffers gather, by dtype, and how many gathers are not waited for."""
    from megatron.core.distributed import param_and_grad_buffer
    original, counts = param_and_grad_buffer.dist_all_gather_func, {}

    def gather(output, *args, **kwargs):
        counts[output.dtype] = counts.get(output.dtype, 0) + output.numel() * output.element_size()
        counts["async"] = counts.get("async", 0) + bool(kwargs.get("async_op"))
        return original(output, *args, **kwargs)
    param_and_grad_buffer.dist_all_gather_func = gather
    return counts


def training(rank):
    ddp, optimizer, values = build(300)
    assert len(values) == 4 * LAYERS
    for name, p in ddp.named_parameters():
        assert name not in values or torch.equal(master_of(p, optimizer), values[name].cpu()), f"{name}: not the values"
    gathered, losses = count_gathers(), []
    for step in range(STEPS):
        losses.append(step_of(ddp, optimizer, step, rank))
        check_weights(ddp, optimizer, gathered)
    assert sum(losses[-3:]) / 3 < 0.9 * losses[0], losses
    if rank == 0:
        print(f"losses {losses[0]:.3f} to {losses[-1]:.3f}, {len(values)} NVFP4 weights, {STEPS} steps", flush=True)


def overlapping(rank):
    """Gathers of several buckets beside the forward pass: what training gives that waits for each where it begins."""
    def run(overlap):
        ddp, optimizer, _values = build(300, overlap_param_gather=overlap, overlap_grad_reduce=True, bucket_size=16384)
        assert len(ddp.bucket_groups) > 2, "one bucket has nothing to overlap with"
        gathered = count_gathers()
        losses = [step_of(ddp, optimizer, step, rank) for step in range(STEPS)]
        if overlap:
            ddp.disable_forward_pre_hook()  # gathers what the last step has left
        return losses, {name: parts(p) for name, p in ddp.named_parameters()}, gathered["async"]
    losses, weights, none = run(False)
    theirs, others, beside = run(True)
    assert none == 0 and beside > STEPS, (none, beside)
    assert losses == theirs, (losses, theirs)
    assert all(same(weight, others[name]) for name, weight in weights.items())
    if rank == 0:
        print(f"losses and weights are the same, {beside} gathers beside the forward pass", flush=True)


# ---- A rank that fails -----------------------------------------------------------------------------------


class Fault(Exception):
    """What the last rank raises."""


def before_backward(ddp, optimizer):
    raise Fault


def between_cast_and_gather(ddp, optimizer):
    def gather():
        raise Fault
    optimizer.start_param_sync_for_bucket_group_subset = gather


def in_the_cast(ddp, optimizer):
    """Masters that cannot be cast: all ranks hear of it from the library, at once."""
    original = optimizer._get_nvfp4_params_and_shard_fp32_from_nvfp4

    def wrong():
        weights, masters, starts = original()
        return weights, [None if master is None else master.int() for master in masters], starts
    optimizer._get_nvfp4_params_and_shard_fp32_from_nvfp4 = wrong


def failing(fault, lingers, rank):
    """One good step, then one in which the last rank fails; where it lingers, its process does not end."""
    ddp, optimizer, _values = build(TIMEOUT)
    step_of(ddp, optimizer, 0, rank)
    dist.barrier()
    start = time.monotonic()
    try:
        if rank == RANKS - 1:
            fault(ddp, optimizer)
        step_of(ddp, optimizer, 1, rank)
    except Exception as error:
        took, kind = time.monotonic() - start, type(error)
        print(f"  rank {rank} after {took:.1f} s: {kind.__name__}: {str(error)[:100]}", flush=True)
        assert took < (SLACK if fault is in_the_cast else TIMEOUT + SLACK)
        if fault is in_the_cast:
            assert isinstance(error, nib.Error)
        elif rank == RANKS - 1:
            assert kind is Fault
        if rank == RANKS - 1 and lingers:
            time.sleep(TIMEOUT + 2 * SLACK)
        return
    raise AssertionError(f"rank {rank} did not fail")


# ---- Ranks -----------------------------------------------------------------------------------------------


def prepare():
    """Megatron over nib's aliases, and over the shim where there is no GPU."""
    if DEVICE == "cpu":
        install_shim()
    nt.install_aliases()
    import megatron.core
    import megatron.core.models.gpt.gpt_model  # noqa: F401
    assert megatron.core.__version__.startswith("0.19.") and not hasattr(megatron.core, "__nib_alias__")
    if DEVICE == "cpu":
        gather_each()


def entry(rank, function, directory):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        if DEVICE != "cpu":
            torch.cuda.set_device(rank)
            prepare()
        store = dist.FileStore(os.path.join(directory, "store"), RANKS)
        dist.init_process_group("gloo" if DEVICE == "cpu" else "nccl", store=store, rank=rank, world_size=RANKS,
                                timeout=datetime.timedelta(seconds=300))
        function(rank)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # a group that is broken would be waited for


def ranks_pass(name, function):
    """Whether all ranks of a function come to its end."""
    with tempfile.TemporaryDirectory() as directory:
        # A process that has seen a GPU cannot be forked; on the CPU ranks are made of this one, which has Megatron.
        context = mp.start_processes(entry, (function, directory), nprocs=RANKS, join=False,
                                     start_method="fork" if DEVICE == "cpu" else "spawn")
        ranks = context.processes
        for process in ranks:
            process.join(900)
            process.kill()
    passed = all(process.exitcode == 0 for process in ranks)
    print(f"{name}: {'passed' if passed else 'FAILED'}", flush=True)
    return passed


def main():
    if DEVICE == "cpu":
        prepare()
    cases = {"training": training, "overlapping": overlapping}
    for fault, lingers in ((before_backward, False), (before_backward, True), (between_cast_and_gather, False),
                           (in_the_cast, False)) if RANKS > 1 else ():
        name = f"{fault.__name__}, {'and stays' if lingers else 'and leaves'}"
        cases[name] = functools.partial(failing, fault, lingers)
    results = [ranks_pass(name, function) for name, function in cases.items()]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed, 0 skipped")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
