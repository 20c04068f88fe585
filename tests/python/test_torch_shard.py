# SPDX-License-Identifier: Apache-2.0
"""Sharded casts, gathers and reductions over torch.distributed (gloo), with 2 and 3 processes: the bytes of one.

Each test is a function of a rank that runs in processes of its own; `check` there collects failures, and a rank that
raises ends the test.
"""
import contextlib
import datetime
import os
import pathlib
import signal
import tempfile
import time
import traceback

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch; TORCH=1 installs it")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

import nib  # noqa: E402
from nib.torch import (DType, Float8BlockQuantizer, Float8CurrentScalingQuantizer, Float8Quantizer,  # noqa: E402
                       MXFP8Quantizer, NVFP4Quantizer, gather_along_first_dim, post_all_gather_processing,
                       quantize_master_weights, quantize_nvfp4_param_shard, set_quantizer_amax_reduction_group)
from nib.torch.grouped_tensor import split_quantize  # noqa: E402
from nib.torch.utils import all_gather_param  # noqa: E402

SIZES = [2, 3]
TIMEOUT = 2  # seconds, of groups whose rank stays away
DEADLINE = 600  # seconds; whoever waits for a rank that never comes is killed


def entry(rank, function, size, directory):
    """The ranks meet in a file: a port that was free a moment ago may be another test's by now."""
    signal.alarm(DEADLINE)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group("gloo", store=dist.FileStore(os.path.join(directory, "store"), size), rank=rank,
                                world_size=size)
        function(rank, size)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        with open(os.path.join(directory, f"rank{rank}"), "w", encoding="utf-8") as file:
            file.write(traceback.format_exc())
        raise
    signal.alarm(0)


def run(function, size, tmp_path):
    why = None
    with tempfile.TemporaryDirectory(dir=tmp_path) as directory:
        try:
            mp.spawn(entry, (function, size, directory), nprocs=size)
        except Exception as error:
            words = [(path.name, path.read_text()) for path in sorted(pathlib.Path(directory).glob("rank*"))]
            why = "\n".join(f"{name}: {text}" for name, text in words) or f"a rank died without a word: {error}"
    if why:
        pytest.fail(why, pytrace=False)


def data(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(a, b):
    """Bytes of every part that a has."""
    return all(getattr(a, f.name) is None or torch.equal(getattr(a, f.name), getattr(b, f.name)) for f in a.FIELDS)


def cuts(total, size, odd):
    """Borders of the ranks' shards; odd ones fall into the middle of bytes."""
    borders = [total * r // size for r in range(size + 1)]
    if odd:
        borders = [b if b in (0, total) else b | 1 for b in borders]
    return borders


def weights_and_whole():
    """(quantizer, shape): what can be cast in shards."""
    e4m3 = DType.kFloat8E4M3
    return [
        (NVFP4Quantizer(block_dims=(16, 16)), (48, 80)), (NVFP4Quantizer(block_dims=(16, 16)), (33, 17)),
        (NVFP4Quantizer(columnwise=False), (32, 64)), (NVFP4Quantizer(block_dims=(16, 16)), (1, 1)),
        (MXFP8Quantizer(e4m3), (64, 96)), (Float8CurrentScalingQuantizer(e4m3), (48, 40)),
        (Float8Quantizer(torch.full((1,), 4.0), torch.zeros(1), e4m3), (32, 16)),
        (Float8BlockQuantizer(e4m3, rowwise=True, columnwise=True), (130, 140)),
    ]


def cast(rank, size, odd, manual, fsdp):
    weights, wholes, masters, starts, shards, ranges = [], [], [], [], [], []
    for i, (q, shape) in enumerate(weights_and_whole()):
        master = data(*shape, seed=10 + i)
        whole = q(master.bfloat16()).detach()
        if isinstance(q, Float8Quantizer):
            q.amax.zero_()
        weight = q(torch.zeros(shape, dtype=torch.bfloat16)).detach()
        borders = cuts(master.numel(), size, odd)
        first, last = borders[rank], borders[rank + 1]
        empty = first == last
        masters.append(None if empty else master.reshape(-1)[first:last])
        starts.append(None if empty else first)
        weights.append(weight)
        wholes.append(whole)
        ranges.append((first, last - first))
        packed = isinstance(q, NVFP4Quantizer) and shape[1] % 2 == 0
        byte_range = (first // 2, (last + 1) // 2) if packed else (first, last)
        row = torch.zeros(byte_range[1] - byte_range[0], dtype=torch.uint8)
        shards.append((row, row.clone()) if isinstance(q, MXFP8Quantizer) else row)
    usable = [i for i, (q, shape) in enumerate(weights_and_whole())
              if not fsdp or not isinstance(q, NVFP4Quantizer) or shape[1] % 2 == 0]

    def chosen(values):
        return [values[i] for i in usable]

    quantize_master_weights(chosen(weights), chosen(masters), chosen(starts), None,
                            fsdp_shard_model_weights=[None if masters[i] is None else shards[i] for i in usable]
                            if fsdp else None, manual_post_all_gather_processing=manual)
    for i in usable:
        weight, whole = weights[i], wholes[i]
        if isinstance(weight._quantizer, MXFP8Quantizer):  # both usages are cast, and both are gathered
            first, length = ranges[i]
            assert torch.equal(weight._rowwise_scale_inv, whole._rowwise_scale_inv)
            assert torch.equal(weight._columnwise_scale_inv, whole._columnwise_scale_inv)
            for n, name in enumerate(("_rowwise_data", "_columnwise_data")):
                mine = shards[i][n] if fsdp else getattr(weight, name).view(-1)[first:first + length]
                assert torch.equal(mine, getattr(whole, name).view(-1)[first:first + length]), name
            continue
        if not manual and not isinstance(weight._quantizer, Float8Quantizer):
            assert weight.get_usages()["columnwise"] is False
        first, length = ranges[i]
        shard = shards[i] if fsdp and length else None
        all_gather_param(weight, first, length, shard=shard)
        post_all_gather_processing([weight])
        assert same(weight, whole), (type(weight).__name__, tuple(weight.shape))
        if isinstance(weight._quantizer, Float8Quantizer):
            assert weight._quantizer.amax.item() == data(*weight.shape, seed=10 + i).bfloat16().abs().max().item()


def cast_even(rank, size):
    cast(rank, size, odd=False, manual=False, fsdp=False)
    cast(rank, size, odd=False, manual=True, fsdp=False)


def cast_odd(rank, size):
    """Shards that begin in the middle of a byte, where TransformerEngine misplaces all but the first element."""
    cast(rank, size, odd=True, manual=False, fsdp=False)
    cast(rank, size, odd=True, manual=True, fsdp=False)


def cast_fsdp(rank, size):
    cast(rank, size, odd=False, manual=False, fsdp=True)
    cast(rank, size, odd=True, manual=True, fsdp=True)


def cast_by_megatron(rank, size):
    q = NVFP4Quantizer(block_dims=(16, 16))
    master = data(64, 96)
    weights = [q(torch.zeros(64, 96, dtype=torch.bfloat16)).detach() for _ in range(2)]
    old = weights[0]._columnwise_data
    borders = cuts(master.numel(), size, False)
    shard = master.view(-1)[borders[rank]:borders[rank + 1]]
    quantize_nvfp4_param_shard([], [], [], None)  # no collective
    # The second weight belongs to the last rank alone.
    last = rank == size - 1
    quantize_nvfp4_param_shard(weights, [shard, master.view(-1) if last else None],
                               [borders[rank], 0 if last else None], None)
    whole = q(master.bfloat16())
    assert weights[0]._columnwise_data is old, "manual: buffers stay where they are"
    assert torch.equal(weights[1]._rowwise_scale_inv, whole._rowwise_scale_inv)
    assert torch.equal(weights[1]._amax_rowwise, whole._amax_rowwise)
    all_gather_param(weights[0], borders[rank], len(shard))
    all_gather_param(weights[1], 0, master.numel() if last else 0)
    post_all_gather_processing(weights)
    assert all(same(w, whole) for w in weights) and weights[0]._columnwise_data is old
    with pytest.raises(nib.ModeError):
        mx = MXFP8Quantizer()(torch.zeros(64, 96))
        quantize_nvfp4_param_shard([mx], [None], [None], None)


def rejected(rank, size):
    """A fault on one rank is an error on all, and none has changed."""
    q = NVFP4Quantizer(block_dims=(16, 16))
    weight = q(data(32, 32)).detach()
    before = weight.dequantize()
    start = 0 if rank else 5000  # rank 0 points outside of the weight
    with pytest.raises(nib.Error):
        quantize_master_weights([weight], [torch.ones(16)], [start], None)
    assert torch.equal(weight.dequantize(), before) and weight.get_usages() == {"rowwise": True, "columnwise": True}
    with pytest.raises(nib.Error):  # lists of different lengths
        quantize_master_weights([weight], [], [], None)
    with pytest.raises(nib.MismatchError):  # ranks that pass different weights
        other = q(torch.zeros(32 + 16 * rank, 32)).detach()
        quantize_master_weights([other], [None], [None], None)
    for bad in (NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False), NVFP4Quantizer(with_rht=True),
                NVFP4Quantizer(nvfp4_use_4over6=True, block_dims=(16, 16), columnwise=False)):
        with pytest.raises(nib.Error):
            quantize_master_weights([bad(data(32, 32)).detach()], [None], [None], None)
    with pytest.raises(ValueError):
        quantize_master_weights([torch.zeros(3)], [None], [None], None)
    assert torch.equal(weight.dequantize(), before)


def too_far(rank, size):
    """Offsets of 2^64 and more, which ctypes would wrap around to elements of the weight."""
    q = NVFP4Quantizer(block_dims=(16, 16))
    weight = q(data(32, 32)).detach()
    before = weight.dequantize()
    for far in (1 << 64, (1 << 64) + 16, 1 << 63):
        for culprit in {0, size - 1}:
            start = far if rank == culprit else 0
            for call in (lambda: quantize_master_weights([weight], [torch.ones(16)], [start], None),
                         lambda: all_gather_param(weight, start, 16), lambda: all_gather_param(weight, 0, start)):
                with pytest.raises(nib.Error) as caught:
                    call()
                if rank == culprit:
                    assert isinstance(caught.value, nib.ArgumentError) and str(far) in str(caught.value), caught.value
    assert torch.equal(weight.dequantize(), before)


class Odd:
    """What no list of tensors holds."""


def rejected_in_python(rank, size):
    """The same where it is Python that finds the fault, before the library is called."""
    q = NVFP4Quantizer(block_dims=(16, 16))
    weight = q(data(48, 32)).detach()
    before = weight.dequantize()
    length = weight.numel() // size
    master, shard = torch.ones(length), torch.zeros(length // 2, dtype=torch.uint8)
    good = dict(model_weights=[weight], master_weights=[master], start_offsets=[length * rank], group=None,
                fsdp_shard_model_weights=[shard])
    faults = [dict(model_weights=[torch.zeros(3)]), dict(model_weights=None), dict(master_weights=[Odd()]),
              dict(master_weights=[master.to(torch.int32)]), dict(master_weights=[master.to(torch.complex64)]),
              dict(start_offsets=["here"]), dict(start_offsets=[Odd()]),
              dict(fsdp_shard_model_weights=[shard.float()]), dict(fsdp_shard_model_weights=[shard.repeat(2)[::2]]),
              dict(fsdp_shard_model_weights=[(shard, shard, shard)])]
    for fault in faults:
        for culprit in {0, size - 1}:
            with pytest.raises(Exception) as caught:
                quantize_master_weights(**{**good, **(fault if rank == culprit else {})})
            if rank != culprit:
                assert isinstance(caught.value, nib.Error) and "another" in str(caught.value), (fault, caught.value)
            assert torch.equal(weight.dequantize(), before), fault
    with pytest.raises(Exception):
        quantize_nvfp4_param_shard([weight] if rank else [Odd()], [master], [length * rank], None)
    with pytest.raises(nib.Error):
        quantize_nvfp4_param_shard(*([[weight], [master], [length * rank]] if rank else [[], [], []]), None)
    with pytest.raises(Exception):
        all_gather_param(weight, length * rank if rank else "here", length, None)
    with pytest.raises(Exception):
        all_gather_param(weight, length * rank, length, None, shard=None if rank else shard.float())
    assert torch.equal(weight.dequantize(), before)
    quantize_master_weights(**good)  # nobody waits for anybody


def amax_reduction(rank, size):
    """Quantizing shards with a reduced amax, then gathering, is quantizing the whole."""
    for q in (NVFP4Quantizer(), NVFP4Quantizer(block_dims=(16, 16)), NVFP4Quantizer(with_rht=True),
              Float8CurrentScalingQuantizer(DType.kFloat8E4M3), MXFP8Quantizer()):
        x = data(32 * size, 64).bfloat16()
        mine = x[32 * rank:32 * (rank + 1)]
        if hasattr(q, "with_amax_reduction"):
            set_quantizer_amax_reduction_group(q, dist.group.WORLD)
        shard = q(mine)
        assert not getattr(shard._quantizer, "with_amax_reduction", False), "a group never stays with a tensor"
        whole_quantizer = q.copy()
        if hasattr(q, "with_amax_reduction"):
            set_quantizer_amax_reduction_group(whole_quantizer, None)
            name = "_scale_inv" if isinstance(q, Float8CurrentScalingQuantizer) else "_amax_rowwise"
            assert torch.equal(getattr(shard, name), getattr(whole_quantizer(x), name))
        for inp in (mine, shard):
            gathered, handle = gather_along_first_dim(inp, dist.group.WORLD, quantizer=q)
            assert handle is None and same(gathered, whole_quantizer(x))
    plain, _ = gather_along_first_dim(mine, dist.group.WORLD)
    assert torch.equal(plain, x)
    odd = data(3, 8).bfloat16()  # cannot be gathered in quantized form
    gathered, _ = gather_along_first_dim(odd, dist.group.WORLD, quantizer=NVFP4Quantizer())
    assert same(gathered, NVFP4Quantizer()(torch.cat([odd] * size)))
    q = NVFP4Quantizer()
    with pytest.raises(nib.MismatchError):  # each rank has an amax of its own
        gather_along_first_dim(q(mine * (rank + 1)), dist.group.WORLD)


def reductions_rejected_in_python(rank, size):
    """A fault before the reduction of amaxes, or before a gather, is an error on all ranks, and nobody waits."""
    x, q = data(32, 64), NVFP4Quantizer(with_amax_reduction=True)
    f8 = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, with_amax_reduction=True)
    weight, other = q(x).detach(), NVFP4Quantizer()(x).detach()
    other.amax_reduction_group = dist.group.WORLD
    before = weight.dequantize()
    cleared = NVFP4Quantizer()(x).detach()
    cleared.update_usage(rowwise_usage=False, columnwise_usage=False)
    world, flag = dist.group.WORLD, torch.zeros(1)
    calls = [  # (call, the right argument, wrong ones)
        (q, x, [x.double(), x.int(), Odd(), None, cleared, x[0, 0]]),
        (f8, x, [x.double(), Odd()]),
        (lambda src: q.update_quantized(src, weight), x, [x.double(), x[:16], Odd(), cleared]),
        (lambda dst: q.update_quantized(x, dst), weight, [x, None, q(data(16, 64))]),
        (lambda noop: q.update_quantized(x, weight, noop_flag=noop), flag, [flag.double(), torch.zeros(2), Odd()]),
        (other.quantize_, x, [x.double(), x[:16]]),
        (lambda t: nib.torch.tex.nvfp4_quantize_with_amax(t, q, torch.ones(1)), x, [x.double(), Odd()]),
        (lambda n: split_quantize(x, n, [q, q]), [16, 16], [[16, 15], [32], [16, "rows"]]),
        (lambda n: nib.torch.group_quantize(x, q, 2, first_dims=n), [16, 16], [[16, 17], [16, "rows"]]),
        (lambda t: gather_along_first_dim(t, world, quantizer=q), x, [x.double(), x[:5], Odd(), None, weight]),
        (lambda t: gather_along_first_dim(t, world, quantizer=NVFP4Quantizer()), torch.ones(32, 64),
         [x.double(), x[:5], Odd(), None, cleared]),
        (lambda t: gather_along_first_dim(t, world, quantizer=NVFP4Quantizer()), x[:5], [Odd(), None, x]),
        (lambda t: gather_along_first_dim(t, world), x, [x.double(), x[:5], x.view(64, 32), Odd(), None, x[0, 0]]),
        (lambda out: gather_along_first_dim(x, world, output_tensor=out), torch.empty(32 * size, 64),
         [x, torch.empty(32 * size, 64).double(), torch.empty(64, 32 * size).t(), Odd()]),
    ]
    for call, good, wrong in calls:
        for bad in wrong:
            for culprit in {0, size - 1}:
                with pytest.raises(Exception) as caught:
                    call(bad if rank == culprit else good)
                assert rank == culprit or isinstance(caught.value, nib.Error), (bad, caught.value)
        call(good)
    q.update_quantized(x, weight)
    assert torch.equal(weight.dequantize(), before)
    q.update_quantized(x * 2, weight, noop_flag=torch.ones(1))  # no reduction: a fault is its own rank's
    with pytest.raises(ValueError) if rank == 0 else contextlib.nullcontext():
        q.update_quantized(x[:16] if rank == 0 else x, weight, noop_flag=torch.ones(1))
    assert torch.equal(weight.dequantize(), before)


def groups_and_subgroups(rank, size):
    """Members of a group share one reduction; a subgroup reduces among its own."""
    q = NVFP4Quantizer(with_amax_reduction=True)
    x = data(64, 32).bfloat16() * (rank + 1)
    members = split_quantize(x, [16, 48], [q, q])
    largest = data(64, 32).bfloat16() * size
    assert [p._amax_rowwise.item() for p in members] == [p.abs().max().item() for p in largest.split([16, 48])]
    assert not members[0]._quantizer.with_amax_reduction
    pair = dist.new_group([0, 1])
    if rank < 2:
        t = NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group=pair)(x)
        assert t._amax_rowwise.item() == (data(64, 32).bfloat16() * 2).abs().max().item()
    # FSDP2 puts the group on a parameter.
    w = NVFP4Quantizer(block_dims=(16, 16))(x).detach()
    w.amax_reduction_group = dist.group.WORLD
    w.quantize_(x)
    assert w._amax_rowwise.item() == largest.abs().max().item()
    w.copy_(x)
    assert w._amax_rowwise.item() == largest.abs().max().item()


def fsdp_hooks(rank, size):
    q = NVFP4Quantizer(block_dims=(16, 16), with_amax_reduction=True)
    x = data(48 * size, 80).bfloat16()
    shard = q(x[48 * rank:48 * (rank + 1)]).detach()
    whole = NVFP4Quantizer(block_dims=(16, 16))(x)
    (codes, scales), metadata = shard.fsdp_pre_all_gather(None, x.shape, (80, 1), None, None)
    assert scales.shape == (48, 8) and len(metadata) == 8

    def gather(t):
        out = torch.empty((t.shape[0] * size, t.shape[1]), dtype=t.dtype)
        dist.all_gather_into_tensor(out, t.contiguous())
        return out

    outputs = (gather(codes), gather(scales))
    out, kept = shard.fsdp_post_all_gather(outputs, metadata, torch.bfloat16)
    assert out.shape == x.shape and same(out, whole)
    assert {id(t) for t in kept} == {id(t) for t in (out._rowwise_data, out._rowwise_scale_inv, out._columnwise_data,
                                                     out._columnwise_scale_inv)}  # whose memory FSDP2 lets go
    again, _ = shard.fsdp_post_all_gather(outputs, metadata, torch.bfloat16, out=out)
    assert again is out and same(out, whole)


def stays_away(rank, size):
    """A rank that does not come, but lives: the others fail when the group's time is over, and nothing has changed."""
    weight = NVFP4Quantizer(block_dims=(16, 16))(data(32, 32)).detach()
    before = weight.dequantize()
    store = dist.PrefixStore("away", dist.distributed_c10d._get_default_store())
    for number, call in enumerate((lambda group: quantize_master_weights([weight], [None], [None], group),
                                   lambda group: all_gather_param(weight, 0, 16, group),
                                   lambda group: gather_along_first_dim(data(4, 4), group))):
        group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT))
        if rank == size - 1:
            store.wait([f"{number}.{other}" for other in range(size - 1)], datetime.timedelta(seconds=DEADLINE))
            continue
        start = time.monotonic()
        with pytest.raises(nib.CommError):
            call(group)
        assert time.monotonic() - start < TIMEOUT + DEADLINE / 4
        assert torch.equal(weight.dequantize(), before)
        store.set(f"{number}.{rank}", "failed")


CASES = [cast_even, cast_odd, cast_fsdp, cast_by_megatron, rejected, too_far, rejected_in_python,
         amax_reduction, reductions_rejected_in_python, groups_and_subgroups, fsdp_hooks, stays_away]


def everything(rank, size):
    for case in CASES:
        try:
            case(rank, size)
        except BaseException as error:
            raise AssertionError(f"{case.__name__} on rank {rank} of {size}") from error
        dist.barrier()


@pytest.mark.parametrize("size", SIZES)
def test_processes(size, tmp_path):
    """All cases in one set of processes: starting them takes longer than the cases."""
    run(everything, size, tmp_path)


def broken(rank, size):
    """A collective that fails is an error with its cause, not a crash or a hang."""
    from nib.torch import _bridge
    communicator = _bridge.Communicator(None)
    communicator._dist = None
    with pytest.raises(nib.CommError) as caught:
        with communicator as comm:
            struct = NVFP4Quantizer()._struct()
            import ctypes
            struct.amax_comm = ctypes.pointer(comm)
            _bridge.quantize(struct, data(16, 16))
    assert isinstance(caught.value.__cause__, AttributeError)


def leaves(rank, size):
    """A rank whose process ends: the others fail at once."""
    weight = NVFP4Quantizer(block_dims=(16, 16))(data(32, 32)).detach()
    before = weight.dequantize()
    if rank < size - 1:
        start = time.monotonic()
        with pytest.raises(nib.CommError):
            quantize_master_weights([weight], [None], [None], None)
        assert time.monotonic() - start < DEADLINE / 4 and torch.equal(weight.dequantize(), before)
    os._exit(0)  # there is no group any more


def broken_and_left(rank, size):
    broken(rank, size)
    dist.barrier()
    leaves(rank, size)


def test_a_broken_communicator(tmp_path):
    run(broken_and_left, 2, tmp_path)


def test_one_process_without_distributed():
    q = NVFP4Quantizer(block_dims=(16, 16))
    master = data(48, 80)
    weight = q(torch.zeros(48, 80, dtype=torch.bfloat16)).detach()
    quantize_master_weights([weight], [master.view(-1)], [0], None)
    post_all_gather_processing(weight)
    assert same(weight, q(master.bfloat16()))
    with pytest.raises(nib.CommError):
        quantize_master_weights([weight], [None], [None], object())
    post_all_gather_processing([torch.zeros(3)])  # plain tensors pass
