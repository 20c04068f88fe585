# SPDX-License-Identifier: Apache-2.0
"""FSDP2, DCP and DDP over NVFP4 weights, with 2 and 3 gloo processes: shards stay NVFP4, their codes are gathered, and
what is computed is what one process computes."""
import functools
import json
import os
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch; TORCH=1 installs it")

import torch.distributed as dist  # noqa: E402

import nib  # noqa: E402
import nib.torch as nt  # noqa: E402
from nib import _checkpoint  # noqa: E402
from nib.torch.format_tensor import rows_of  # noqa: E402
from nib.torch.recipe import NVFP4BlockScaling  # noqa: E402
from conftest import ROOT  # noqa: E402
from test_torch_shard import run  # noqa: E402

RECIPE = NVFP4BlockScaling()  # stochastic rounding too: what a rank draws is what the one process draws for it
STEPS, MICROBATCHES = 4, 2


def model_of(bias=True, device=None, keep=False):
    torch.manual_seed(0)
    with nt.quantized_model_init(recipe=RECIPE, preserve_high_precision_init_val=keep):
        return torch.nn.Sequential(nt.LayerNormLinear(64, 96, bias=bias, device=device),
                                   nt.LayerNormMLP(96, 192, bias=bias, activation="swiglu", device=device),
                                   nt.Linear(96, 96, bias=bias, device=device))


def sharded(model, replicas=1, **options):
    """In shards over all ranks; or, with replicas (HSDP), over those of a replica."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    if replicas > 1:
        options["mesh"] = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas),
                                           mesh_dim_names=("replicate", "shard"))
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def local(parameter):
    return parameter._local_tensor


def quantized(model):
    return {name: p for name, p in model.named_parameters()
            if isinstance(getattr(p, "_local_tensor", p), nt.NVFP4Tensor)}


def batch(step, rank, micro):
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    return torch.randn(2, 32, 64, generator=generator).unbind()[0], torch.randn(32, 96, generator=generator)


def losses_of(model, step, rank, before=lambda micro: None):
    """Forward and backward over the microbatches of a rank."""
    torch.manual_seed(1000 + 10 * step + rank)
    losses = []
    for micro in range(MICROBATCHES):
        before(micro)
        x, target = batch(step, rank, micro)
        with nt.autocast(recipe=RECIPE):
            loss = (model(x).float() - target).square().mean() / MICROBATCHES
        loss.backward()
        losses.append(loss.item())
    return losses


def same_rows(shard, whole, rank, size):
    """Whether a shard has the bytes of its rows of a whole tensor, and its amax."""
    count = whole.shape[0] // size
    rows = rows_of(whole.detach(), rank * count, count)
    return all(torch.equal(getattr(shard, name), getattr(rows, name))
               for name in ("_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise"))


# ---- Training --------------------------------------------------------------------------------------------


def sum_over(gradients, shards):
    """The sum of all ranks' gradients as FSDP2 adds them: within a replica, then over replicas."""
    replicas = [sum(gradients[i + 1:i + shards], gradients[i]) for i in range(0, len(gradients), shards)]
    return sum(replicas[1:], replicas[0])


def training(rank, size, replicas=1, steps=STEPS):
    """Losses, gradients and weights of every step against one process that runs the batches of all ranks in turn. Sums
    of two gradients and their half are the same in any order; of three they are not, so that the one process takes over
    the masters, and gradients have a bound: 4 roundings of the sum of their absolute values. With replicas, each of
    which has all shards (HSDP), the ranks of a replica add first."""
    shards, exact = size // replicas, size in (2, 4)
    alone, model = model_of(), sharded(model_of(), replicas)
    assert len(quantized(model)) == 4 and quantized(model).keys() == quantized(alone).keys()
    adam = [nt.FusedAdam(m.parameters(), lr=1e-2, master_weights=True) for m in (alone, model)]
    for step in range(steps):
        def sync(micro):
            model.set_requires_gradient_sync(micro == MICROBATCHES - 1)
        mine, gradients = losses_of(model, step, rank, sync), {}
        for other in range(size):
            alone.zero_grad()
            theirs = losses_of(alone, step, other)
            assert other != rank or theirs == mine, (theirs, mine)
            for name, p in alone.named_parameters():
                gradients.setdefault(name, []).append(p.grad)
        for (name, p), (_name, q) in zip(alone.named_parameters(), model.named_parameters()):
            p.grad = sum_over(gradients[name], shards) / size
            bound = 4 * 2.0 ** -24 * sum(g.abs().double() for g in gradients[name]) / size
            want, bound = (t.chunk(shards)[rank % shards] for t in (p.grad, bound))
            got = local(q.grad)
            assert torch.equal(got, want) if exact else ((got.double() - want.double()).abs() <= bound).all(), name
        for one in adam:
            one.step()
        model.zero_grad()
        whole = dict(alone.named_parameters())
        for name, q in model.named_parameters():
            if name not in quantized(model):
                if not exact:
                    whole[name].data.copy_(q.full_tensor())
                assert torch.equal(q.full_tensor(), whole[name])
                continue
            master = adam[1].get_unscaled_state(q, "master_param").full_tensor()
            if not exact:
                whole[name].quantize_(master)
                adam[0].set_scaled_state(whole[name], "master_param", master)
                for state in ("exp_avg", "exp_avg_sq"):
                    adam[0].set_scaled_state(whole[name], state, adam[1].get_unscaled_state(q, state).full_tensor())
            assert torch.equal(master, adam[0].get_unscaled_state(whole[name], "master_param")), name
            assert type(local(q)) is nt.NVFP4Tensor and same_rows(local(q), whole[name], rank % shards, shards), name


def gathers(rank, size):
    """What goes over the wire is codes and scales; between passes the whole weights have no memory."""
    model, sent = sharded(model_of(bias=False)), []
    names = [name for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name)]
    originals = [getattr(dist, name) for name in names]

    def counting(original):
        def gather(output_tensor, input_tensor, *args, **kwargs):
            sent.append(input_tensor.numel() * input_tensor.element_size())
            return original(output_tensor, input_tensor, *args, **kwargs)
        return gather
    for name, original in zip(names, originals):
        setattr(dist, name, counting(original))
    with torch.no_grad(), nt.autocast(recipe=RECIPE):
        model(batch(0, rank, 0)[0])
    for name, original in zip(names, originals):
        setattr(dist, name, original)
    norms = sum(local(p).numel() * 4 for name, p in model.named_parameters() if name not in quantized(model))
    count = sum(local(p).numel() for p in quantized(model).values())
    assert 0.56 * count < sum(sent) - norms <= 0.6 * count, (sent, norms, count)
    states = [group for layer in model for group in layer._get_fsdp_state()._fsdp_param_groups] \
        if hasattr(model[0]._get_fsdp_state(), "_fsdp_param_groups") else \
        [layer._get_fsdp_state()._fsdp_param_group for layer in model]
    for parameter in (p for group in states for p in group.fsdp_params):
        whole = parameter._unsharded_param
        if isinstance(whole, nt.NVFP4Tensor):
            assert whole._rowwise_data.untyped_storage().size() == whole._columnwise_data.untyped_storage().size() == 0
            assert type(parameter._sharded_param_data).__name__ == "Flattened"
            shard = local(parameter.sharded_param)
            assert torch.equal(parameter._sharded_param_data.dequantize(), shard.dequantize().view(-1))


def rejected(rank, size):
    from torch.distributed.fsdp import fully_shard
    with nt.quantized_model_init():
        for rows in (48, 80, 90):
            with pytest.raises(ValueError, match=rf"Linear .*weight: {rows} rows in shards of {-(-rows // size)} "):
                fully_shard(nt.Linear(64, rows))


def on_meta(rank, size, replicas=1):
    """Sharded on the meta device, then given values: shards of what quantizing all of them gives."""
    shards = size // replicas
    model = sharded(model_of(device="meta", keep=True), replicas)
    assert all(local(p).is_meta for p in model.parameters())
    torch.manual_seed(rank % shards)
    for layer in model:
        layer.reset_parameters()
    assert len(quantized(model)) == 4
    for p in quantized(model).values():
        values = local(p).get_high_precision_init_val()
        whole = values.new_empty(values.shape[0] * shards, values.shape[1])
        dist.all_gather_into_tensor(whole, values, group=p.device_mesh.get_group(p.device_mesh.ndim - 1))
        assert same_rows(local(p), local(p)._get_quantizer().copy()(whole), rank % shards, shards)
    adam = nt.FusedAdam(model.parameters(), master_weights=True)
    losses_of(model, 0, rank)
    before = {name: local(p).get_high_precision_init_val() for name, p in quantized(model).items()}
    adam.step()
    for name, p in quantized(model).items():
        assert local(p).get_high_precision_init_val() is None and before[name] is not None
        assert not torch.equal(local(adam.get_unscaled_state(p, "master_param")), before[name])
    losses_of(model, 1, rank)


def plain_values(rank, size):
    """Values that are loaded into shards are quantized as a whole; elsewhere a shard must know of the others first."""
    from torch.distributed.tensor import distribute_tensor
    model, alone = sharded(model_of()), model_of()
    name, weight = next(iter(quantized(model).items()))
    values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not know its ranks"):
        weight.copy_(distribute_tensor(values, weight.device_mesh, weight.placements))
    model.load_state_dict({name: distribute_tensor(values, weight.device_mesh, weight.placements)}, strict=False)
    whole = dict(alone.named_parameters())[name]
    whole.data.quantize_(values)
    assert same_rows(local(weight), whole, rank, size)
    assert torch.equal(weight.full_tensor(), whole.dequantize())


def mixed(rank, size):
    """Activations in BF16, gradients reduced in FP32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, alone = sharded(model_of(), mp_policy=policy), model_of()
    alone.bfloat16()
    assert all(isinstance(p, nt.NVFP4Tensor) for p in quantized(alone).values()) and len(quantized(alone)) == 4
    x, target = batch(0, rank, 0)
    outputs = []
    for m in (model, alone):
        torch.manual_seed(7)
        with nt.autocast(recipe=RECIPE):
            outputs.append(m(x.bfloat16()))
        (outputs[-1].float() - target).square().mean().backward()
    assert outputs[0].dtype == torch.bfloat16 and torch.equal(*outputs)
    for (name, p), q in zip(alone.named_parameters(), model.parameters()):
        total = p.grad.float()
        dist.all_reduce(total)
        assert q.grad.dtype == torch.float32
        assert torch.allclose(q.grad.full_tensor(), total / size, rtol=1e-6, atol=0), name


# ---- Checkpoints -----------------------------------------------------------------------------------------


def saved(directory, rank, size, replicas=1):
    import torch.distributed.checkpoint as dcp
    model = sharded(model_of(), replicas)
    adam = nt.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    losses_of(model, 0, rank)
    adam.step()
    dcp.save({"model": model.state_dict()}, checkpoint_id=os.path.join(directory, "checkpoint"))
    whole = model_of()
    for name, p in model.named_parameters():
        if name in quantized(model):
            dict(whole.named_parameters())[name].quantize_(adam.get_unscaled_state(p, "master_param").full_tensor())
        else:
            dict(whole.named_parameters())[name].data.copy_(p.full_tensor())
    if rank == 0:
        torch.save(whole.state_dict(), os.path.join(directory, "whole"))


def loaded(directory, rank, size, replicas=1):
    import torch.distributed.checkpoint as dcp
    model, shards = sharded(model_of(), replicas), size // replicas
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=os.path.join(directory, "checkpoint"))
    model.load_state_dict(state["model"])
    whole = model_of()
    whole.load_state_dict(torch.load(os.path.join(directory, "whole"), weights_only=True))
    for (name, p), q in zip(whole.named_parameters(), model.parameters()):
        if name in quantized(model):
            assert type(local(q)) is nt.NVFP4Tensor and same_rows(local(q), p, rank % shards, shards), name
        else:
            assert torch.equal(q.full_tensor(), p), name
    x = batch(0, 0, 0)[0]
    with torch.no_grad(), nt.autocast(recipe=RECIPE):
        assert torch.equal(model(x), whole(x))


# ---- DDP -------------------------------------------------------------------------------------------------


def replicated(rank, size):
    model, alone = torch.nn.parallel.DistributedDataParallel(model_of()), model_of()
    adam = [nt.FusedAdam(m.parameters(), lr=1e-2, master_weights=True) for m in (model, alone)]
    for step in range(2):
        for one in adam:
            one.zero_grad()
        torch.manual_seed(rank)
        x, target = batch(step, rank, 0)
        with nt.autocast(recipe=RECIPE):
            loss = (model(x) - target).square().mean()
        loss.backward()
        total = {}
        for other in range(size):
            alone.zero_grad()
            torch.manual_seed(other)
            x, target = batch(step, other, 0)
            with nt.autocast(recipe=RECIPE):
                theirs = (alone(x) - target).square().mean()
            theirs.backward()
            assert other != rank or theirs.item() == loss.item()
            for name, p in alone.named_parameters():
                total[name] = p.grad if other == 0 else total[name] + p.grad
        for (name, p), q in zip(alone.named_parameters(), model.parameters()):
            p.grad = total[name] / size
            assert torch.equal(q.grad, p.grad), name
        for one in adam:
            one.step()
        for p, q in zip(alone.parameters(), model.parameters()):
            assert torch.equal(p.dequantize() if isinstance(p, nt.NVFP4Tensor) else p,
                               q.dequantize() if isinstance(q, nt.NVFP4Tensor) else q)


# ---- All of them, in processes that are started once -----------------------------------------------------


def replicas_of_shards(directory, rank, size):
    """Two replicas of two shards each (HSDP): all of it there."""
    training(rank, size, replicas=2, steps=2)
    on_meta(rank, size, replicas=2)
    saved(directory, rank, size, replicas=2)
    dist.barrier()
    loaded(directory, rank, size, replicas=2)


def in_turn(directory, rank, size):
    training(rank, size)
    for function in (gathers, rejected, on_meta, plain_values, mixed, replicated) if size == 2 else ():
        function(rank, size)
    (saved if size == 2 else loaded)(directory, rank, size)  # saved by two ranks, loaded by three: no byte changes


def test_two_and_three_ranks(tmp_path):
    for size in (2, 3):
        run(functools.partial(in_turn, str(tmp_path)), size, tmp_path)


def test_replicas_of_shards(tmp_path):
    run(functools.partial(replicas_of_shards, str(tmp_path)), 4, tmp_path)


# ---- The example -----------------------------------------------------------------------------------------


def test_pretrain_llama(tmp_path):
    """Six steps at once, and four that two more follow after another start: the same losses, and a whole model."""
    pytest.importorskip("safetensors")
    try:
        _checkpoint.functions()
    except nib.UnsupportedError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    command = [sys.executable, "-W", "ignore", os.path.join(ROOT, "examples/pretrain_llama.py"), "--batch", "2",
               "--context", "32", "--width", "64", "--inner", "128", "--heads", "4", "--blocks", "1", "--compile",
               "aot_eager", "--warmup", "2", "--every", "4"]

    def run_to(steps, name):
        done = subprocess.run([*command, "--steps", str(steps), "--out", str(tmp_path / name)], capture_output=True,
                              text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads((tmp_path / name / "losses.json").read_text())

    whole, first, second = run_to(6, "whole"), run_to(4, "parts"), run_to(6, "parts")
    assert whole == second and first == second[:4] and len(whole) == 6 and whole[-1] < whole[0]
    for name in ("hf/model.safetensors", "hf-nvfp4/model.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    assert (tmp_path / "parts/losses.svg").read_text().startswith("<svg")
    tool = shutil.which("nib") or os.path.join(ROOT, "build/nib")
    if os.path.exists(tool):
        done = subprocess.run([tool, "check", str(tmp_path / "parts/hf-nvfp4")], capture_output=True, text=True,
                              check=False)
        assert done.returncode == 0 and "no findings" in done.stdout, done.stdout
