"""Linear and LM head on a GPU: one chain in every tile, layout, row count and slice; wrong products are caught."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_engine.ops import gemm_table
from rl_engine.ops.gemm_table import Choice, Table
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.operators import provider
from rl_engine.ops.weight import Part, Weight
from tests.helpers.numeric import assert_bitwise, assert_close

triton_gemm = pytest.importorskip("rl_engine.ops.triton_gemm")
Tile = triton_gemm.Tile
ANCHOR = Tile(64, 64, 64, 4, 3)
TILES = [
    *(Tile(16, 32, 128, 4, 4), Tile(16, 64, 128, 4, 3), Tile(64, 16, 128, 4, 5, swap=True), Tile(128, 128, 64, 8, 3)),
    *(Tile(64, 16, 256, 4, 5, swap=True, tma=True), Tile(64, 64, 128, 4, 6, tma=True)),
    *(Tile(128, 128, 64, 8, 5, tma=True, persistent=1), Tile(128, 256, 64, 8, 3, tma=True)),
]


def inputs(seed: int = 1):  # type: ignore[no-untyped-def]
    from rl_engine.qualify.gpu.data import Inputs

    return Inputs(seed)


def weight(value: Tensor) -> Weight:
    return Weight("w", value, (Part("w", 0, value.shape[0]),))


def fp32(a: Tensor, b: Tensor, tile: Tile) -> Tensor:
    out = torch.full((a.shape[0], b.shape[0]), torch.nan, device="cuda")
    triton_gemm.product(a, b, out, tile)
    return out


@pytest.mark.parametrize("kind", ["random", "order-revealing"])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 64, 256), (37, 136, 1000), (200, 320, 520)])
def test_every_tile_has_the_anchors_bits(rows: int, columns: int, depth: int, kind: str) -> None:
    data = inputs()
    a = data.normal(rows, depth) if kind == "random" else data.order_revealing(rows, depth)
    b = data.normal(columns, depth) if kind == "random" else data.weights(columns, depth)
    expected = fp32(a, b, ANCHOR)
    for tile in TILES:
        assert_bitwise(fp32(a, b, tile).cpu(), expected.cpu(), str(tile))
        across = b.T.contiguous().T
        assert_bitwise(fp32(a, across, tile).cpu(), expected.cpu(), f"{tile}, weight read across")
    if kind == "random":
        exact = a.double().cpu() @ b.double().cpu().T
        assert_close(expected.cpu(), exact, rtol=0, atol=1e-4 * depth**0.5, why="fp32 sums of about depth terms")


def test_a_row_does_not_depend_on_its_batch() -> None:
    data = inputs(2)
    a, b = data.order_revealing(300, 512), data.weights(192, 512)
    linear = provider("linear", "triton")
    whole = linear.forward(a, weight(b), None)
    for rows in (1, 2, 7, 8, 9, 16, 17, 63, 64, 65, 128, 129, 255, 300):
        assert_bitwise(linear.forward(a[:rows], weight(b), None).cpu(), whole[:rows].cpu(), f"{rows} rows")
        assert_bitwise(
            linear.forward(a[300 - rows :], weight(b), None).cpu(), whole[300 - rows :].cpu(), f"last {rows}"
        )
    for first, last in ((0, 64), (64, 192), (8, 17)):
        sliced = linear.forward(a, weight(b[first:last]), None)
        assert_bitwise(sliced.cpu(), whole[:, first:last].contiguous().cpu(), f"columns {first}:{last}")


def test_views_in_nan_and_odd_offsets_take_the_same_bits() -> None:
    data = inputs(3)
    a, b = data.normal(33, 250), data.normal(77, 250)
    expected = provider("linear", "triton").forward(a, weight(b), None)
    store = torch.full((35, 263), torch.nan, device="cuda").bfloat16()
    view = store[1:-1, 5:255]
    view.copy_(a)
    assert_bitwise(provider("linear", "triton").forward(view, weight(b), None).cpu(), expected.cpu(), "a view in NaN")


def test_residual_and_gradients() -> None:
    data = inputs(4)
    layout = PackedLayout((1, 16, 37, 70, 64), (1, 2, 1, 1))
    x, residual, dy = data.normal(188, 328), data.normal(188, 208), data.normal(188, 208)
    w = weight(data.normal(208, 328))
    for name in ("triton",):
        linear = provider("linear", name)
        branch = fp32(x, w.value, ANCHOR)
        assert_bitwise(
            linear.forward(x, w, residual).cpu(), (residual.float() + branch).bfloat16().cpu(), "residual epilogue"
        )
        bias = weight(residual[0].clone())
        for rows in (1, 8, 188):
            with torch.no_grad():
                y = linear(x[:rows], w, bias=bias)
            expected = (bias.value.float() + branch[:rows]).bfloat16()
            assert_bitwise(y.cpu(), expected.cpu(), f"bias epilogue, {rows} rows")
        expected = fp32(dy, w.value.T, ANCHOR).bfloat16()
        assert_bitwise(linear.input_gradient(dy, w).cpu(), expected.cpu(), "dX")
        start = torch.randn((208, 328), device="cuda")
        grad, folded = start.clone(), start.clone()
        linear.add_weight_gradient(dy, x, layout, grad)
        for first, last in layout.unit_bounds:
            folded += fp32(dy[first:last].T, x[first:last].T, ANCHOR)
        assert_bitwise(grad.cpu(), folded.cpu(), "dW, unit by unit")
        ones, column = torch.ones((188, 1), dtype=torch.bfloat16, device="cuda"), start[:, 0].clone()
        summed = column.clone()
        linear.add_weight_gradient(dy, ones, layout, column.unsqueeze(1))
        for first, last in layout.unit_bounds:
            summed += fp32(dy[first:last].T, ones[first:last].T, ANCHOR)[:, 0]
        assert_bitwise(column.cpu(), summed.cpu(), "a bias' gradient, unit by unit")


@pytest.mark.parametrize("tile", ["pointers", "tma", "hopper"])
def test_folds_take_any_unit_lengths(tile: str) -> None:
    data = inputs(5)
    names = {"tma": "FOLD_TILE", "pointers": "FOLD_POINTERS", "hopper": "FOLD_HOPPER"}
    chosen = getattr(triton_gemm, names[tile])
    if tile == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the specialized fold is made for compute capability 9")
    for lengths in ([64, 128, 64], [1, 15, 16, 17, 37, 63, 65, 200], [5]):
        ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        bounds = tuple(zip([0, *ends[:-1]], ends, strict=True))
        dy, x = data.order_revealing(144, ends[-1]).T.contiguous(), data.weights(272, ends[-1]).T.contiguous()
        grad = torch.randn((144, 272), device="cuda")
        expected = grad.clone()
        triton_gemm.fold(dy, x, grad, bounds, chosen)
        for first, last in bounds:
            expected += fp32(dy[first:last].T, x[first:last].T, ANCHOR)
        assert_bitwise(grad.cpu(), expected.cpu(), f"units {lengths}")


def test_wrong_products_are_caught_at_the_smallest_shape() -> None:
    from rl_engine.qualify.gpu.run import controls

    cases = list(controls(inputs(6)))
    assert {case.what for case in cases if case.control} == {"split-K", "tf32", "a preloaded accumulator"}
    for case in cases:
        assert case.holds, case


def test_head_gradients_and_slices() -> None:
    data = inputs(7)
    h, w, dz = data.normal(45, 256), weight(data.normal(600, 256)), data.normal(45, 200)
    head = provider("lm_head", "triton")
    z = head.logits(h, w)
    assert z.dtype == torch.float32
    assert_bitwise(z.cpu(), fp32(h, w.value, ANCHOR).cpu(), "logits")
    assert_bitwise(head.logits(h, w, (128, 328)).cpu(), z[:, 128:328].contiguous().cpu(), "columns")
    dh = torch.randn((45, 256), device="cuda")
    expected = dh + fp32(dz, w.value[128:328].T, ANCHOR)
    head.add_input_gradient(dz, w, (128, 328), dh)
    assert_bitwise(dh.cpu(), expected.cpu(), "dH")


def test_graph_replay_has_the_bits_of_a_plain_launch() -> None:
    data = inputs(8)
    x, w, linear = data.normal(8, 512), weight(data.normal(256, 512)), provider("linear", "triton")
    plain = linear.forward(x, w, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = linear.forward(x, w, None)
    graph.replay()
    assert_bitwise(captured.cpu(), plain.cpu(), "graph against eager")


def small_table() -> tuple[Table, list[str]]:
    """A proven table of one small shape."""
    from rl_engine.qualify.gpu.products import Products, Shape

    entries, held = {}, []
    for kind, columns, depth in (("forward", 256, 512), ("residual", 256, 512), ("dx", 512, 256)):
        prover = Products(Shape(kind, columns, depth), inputs(9))
        entries[gemm_table.key(kind, columns, depth)], _ = prover.choose((1, 64, 300))
        held += [case.what for case in prover.cases if case.holds]
    return Table(gemm_table.identity(), entries, "d" * 64), held


def test_the_table_is_proven_used_and_refused_when_stale(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(gemm_table, "path", lambda: tmp_path / gemm_table.NAME)
    gemm_table.current.cache_clear()
    linear = provider("linear", "cublaslt")
    data = inputs(10)
    x, w = data.order_revealing(77, 512), weight(data.weights(256, 512))
    with pytest.raises(gemm_table.NotQualified, match="run rlk-repro qualify"):
        linear.forward(x, w, None)
    table, held = small_table()
    assert len(held) > 20
    gemm_table.keep(table)
    assert_bitwise(linear.forward(x, w, None).cpu(), fp32(x, w.value, ANCHOR).bfloat16().cpu(), "by the table")
    with pytest.raises(gemm_table.NotQualified, match="forward of 128 x 512 was not proven"):
        linear.forward(x, weight(data.weights(128, 512)), None)
    for name in ("driver", "triton", "sources"):
        gemm_table.keep(Table({**table.identity, name: "other"}, table.entries, table.digest))
        with pytest.raises(gemm_table.NotQualified, match=f"stale .other {name}"):
            linear.forward(x, w, None)
    gemm_table.current.cache_clear()


def test_a_wrong_candidate_is_refuted_and_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the proof: a product that splits K stands among the candidates, and is the fastest."""
    from rl_engine.qualify.gpu import products
    from rl_engine.qualify.gpu.controls import wrong_product

    wrong, run = Choice(Tile(16, 16, 32, 1, 1), None), gemm_table.run

    def sometimes_wrong(choice: Choice, a: Tensor, b: Tensor, out: Tensor, old: Tensor | None = None) -> None:
        if choice == wrong:
            result = torch.empty(out.shape, device="cuda")
            wrong_product(a, b, result, split=2)
            out.copy_(result)
        else:
            run(choice, a, b, out, old)

    monkeypatch.setattr(gemm_table, "run", sometimes_wrong)
    monkeypatch.setattr(products, "tiles", lambda rows, columns: [wrong, ANCHOR])
    monkeypatch.setattr(products, "ALGORITHMS", 1)
    prover = products.Products(products.Shape("forward", 64, 256), inputs(11))
    (_, chosen), *_ = prover.choose((16,))[0]
    assert chosen != wrong
    assert any(not case.holds for case in prover.cases)


RANKS, COLUMNS, DEPTH = 4, 768, 512
CUT = PackedLayout((1, 40, 23, 64, 72), (2, 1, 1, 1))


def slice_table(monkeypatch: pytest.MonkeyPatch) -> Table:
    """Few candidates, proven on the whole layer and on the slices of its ranks."""
    from rl_engine.qualify.gpu import products

    monkeypatch.setattr(products, "tiles", lambda rows, columns: [Tile(64, 64, 128, 4, 5, tma=True), ANCHOR])
    monkeypatch.setattr(products, "fold_tiles", lambda: [triton_gemm.FOLD_POINTERS, triton_gemm.FOLD_TILE])
    monkeypatch.setattr(products, "ALGORITHMS", 2)
    monkeypatch.setattr(products, "FOLD_ROWS", 512)
    entries = {}
    for ranks in (1, RANKS):
        for kind, columns, depth in (
            ("forward", COLUMNS // ranks, DEPTH),
            ("dx", DEPTH // ranks, COLUMNS),
            ("fold", COLUMNS // ranks, DEPTH),
        ):
            shape = products.Shape(kind, columns, depth)
            prover = (products.Folds if kind == "fold" else products.Products)(shape, inputs(12))
            entries[str(shape)] = prover.choose((64,))[0]
    return Table(gemm_table.identity(), entries, "d" * 64)


@pytest.mark.parametrize("name", ["triton", "cublaslt"])
def test_slices_of_tensor_parallel_ranks(name: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Columns of the forward, depth slices of dX, rows of dW with its fold: each rank's is a part of the whole."""
    monkeypatch.setattr(gemm_table, "path", lambda: tmp_path / gemm_table.NAME)
    if name == "cublaslt":
        gemm_table.keep(slice_table(monkeypatch))
    linear, data = provider("linear", name), inputs(13)
    x, ones = data.order_revealing(CUT.tokens, DEPTH), weight(data.weights(COLUMNS, DEPTH))
    dy = data.order_revealing(CUT.tokens, COLUMNS)
    loud = data.order_revealing(COLUMNS, CUT.tokens).T.contiguous()  # the axis of dW is the tokens
    start = torch.randn((COLUMNS, DEPTH), generator=data.random, device="cuda")
    whole = linear.forward(x, ones, None), linear.input_gradient(dy, ones), start.clone()
    linear.add_weight_gradient(loud, x, CUT, whole[2])
    chains = start.clone()
    for first, last in CUT.unit_bounds:
        chains += fp32(loud[first:last].T, x[first:last].T, ANCHOR)
    assert_bitwise(whole[2].cpu(), chains.cpu(), "dW, chain by chain")
    for rank in range(RANKS):
        rows = slice(rank * COLUMNS // RANKS, (rank + 1) * COLUMNS // RANKS)
        inner = slice(rank * DEPTH // RANKS, (rank + 1) * DEPTH // RANKS)
        found = linear.forward(x, weight(ones.value[rows]), None)
        assert_bitwise(found.cpu(), whole[0][:, rows].contiguous().cpu(), f"forward of rank {rank}")
        found = linear.input_gradient(dy, weight(ones.value[:, inner].contiguous()))
        assert_bitwise(found.cpu(), whole[1][:, inner].contiguous().cpu(), f"dX of rank {rank}")
        for what, mine in (("a view", loud[:, rows]), ("a copy", loud[:, rows].contiguous())):
            grad = start[rows].clone()
            linear.add_weight_gradient(mine, x, CUT, grad)
            assert_bitwise(grad.cpu(), whole[2][rows].cpu(), f"dW of rank {rank}, {what} of dY")
    partial = sum(fp32(dy[:, part], ones.value[part].T, ANCHOR) for part in torch.arange(COLUMNS).chunk(RANKS))
    assert int((partial.bfloat16() != whole[1]).sum()) > 100, "the control: partial sums of ranks"
    one_unit = start + fp32(loud.T, x.T, ANCHOR)
    assert int((one_unit != whole[2]).sum()) > 100, "the control: one chain over all units"
    gemm_table.current.cache_clear()
