import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from multilin.errors import InputError
from multilin.model.factory import create_model, model_names, training_defaults
from multilin.training.optimizers import (
    OPTIMIZERS,
    MatrixMoment,
    Muon,
    NormalizedSGD,
    build_optimizer,
    matrix_parameters,
    muon,
    optimizer_bytes,
    parameter_groups,
    resolve_optimizer,
    row_parameters,
)
from multilin.training.recipe import load_recipe
from multilin.training.settings import OptimizerRecipe

Make = Callable[..., torch.optim.Optimizer]

KINDS: dict[str, Make] = {
    "normalized_sgd": NormalizedSGD,
    "normalized_sgd_average_first": lambda *a, **k: NormalizedSGD(*a, row_order="average_then_normalize", **k),
    "matrix_moment": MatrixMoment,
}


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Make:
    return KINDS[request.param]


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def walk(make: Make, gradients: list[Tensor], *, rows: bool, start: Tensor | None = None, **options: Any) -> Tensor:
    """Where a parameter of these gradients ends, from 1 or from `start`."""
    parameter = nn.Parameter(torch.ones_like(gradients[0]) if start is None else start.clone())
    optimizer = make([parameter], rows=rows, **options)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


@settings(max_examples=20, deadline=None)
@given(st.floats(-12, 12), st.booleans(), st.sampled_from(sorted(KINDS)))
def test_the_scale_of_all_gradients_does_not_matter(exponent: float, rows: bool, kind: str) -> None:
    gradients = [draw(5, 3, seed=seed, dtype=torch.float32) for seed in range(4)]
    scaled = [gradient * 10**exponent for gradient in gradients]
    expected = walk(KINDS[kind], gradients, rows=rows)
    torch.testing.assert_close(walk(KINDS[kind], scaled, rows=rows), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [True, False])
def test_gradients_too_small_to_be_squared_leave_numbers(make: Make, rows: bool) -> None:
    for scale in (1e-19, 3e-20, 1e-21, 1e-22, 1e-30, 1e-45):
        moved = walk(make, [torch.full((3, 4), scale)], rows=rows, lr=0.1) - 1
        assert moved.abs().max() <= 0.2, scale


@pytest.mark.parametrize("first", [True, False])
def test_rows_do_not_know_of_each_other(make: Make, first: bool) -> None:
    gradients = [draw(6, 4, seed=seed) for seed in range(3)]
    own = walk(make, [g[:2] if first else g[2:] for g in gradients], rows=True)
    together = walk(make, gradients, rows=True)
    torch.testing.assert_close(together[:2] if first else together[2:], own, rtol=1e-14, atol=0)


def test_a_tensor_as_a_whole_turns_with_its_gradient(make: Make) -> None:
    """Rotating weights and gradients rotates the path: nothing is done number by number, as Adam does."""
    turn = torch.linalg.qr(draw(15, 15, seed=9)).Q
    gradients, start = [draw(5, 3, seed=seed) for seed in range(4)], draw(5, 3, seed=7)

    def turned(tensor: Tensor) -> Tensor:
        return (turn @ tensor.flatten()).view_as(tensor)

    path = walk(make, gradients, rows=False, start=start)
    torch.testing.assert_close(
        walk(make, [turned(g) for g in gradients], rows=False, start=turned(start)), turned(path)
    )


def test_normalized_sgd_moves_every_tensor_by_the_learning_rate() -> None:
    for shape in [(7,), (4, 3), (2, 3, 5), (1,)]:
        moved = walk(NormalizedSGD, [draw(*shape, seed=1) * 1e3], rows=False, lr=0.25) - 1
        assert moved.norm().item() == pytest.approx(0.25)


def test_matrix_moment_moves_by_the_learning_rate_where_the_gradient_stays() -> None:
    gradient = draw(9, 4, seed=1)
    for rows in (False, True):
        moved = walk(MatrixMoment, [gradient] * 400, rows=rows, lr=0.25)
        last = walk(MatrixMoment, [gradient] * 401, rows=rows, lr=0.25) - moved
        assert last.square().mean().sqrt().item() == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize("rows", [False, True])
def test_a_zero_gradient_from_the_start_moves_nothing_but_decay(make: Make, rows: bool) -> None:
    zero = torch.zeros(4, 3)
    assert torch.equal(walk(make, [zero] * 3, rows=rows), torch.ones(4, 3))
    torch.testing.assert_close(
        walk(make, [zero] * 3, rows=rows, lr=0.1, weight_decay=0.5), torch.full((4, 3), 0.95**3), rtol=1e-6, atol=0
    )


def test_a_row_whose_gradient_stops_goes_on_along_its_average(make: Make) -> None:
    gradients = [draw(3, 4, seed=1), draw(3, 4, seed=2)]
    stopped = [gradients[0], gradients[1].index_fill(0, torch.tensor([1]), 0.0)]
    first = walk(make, gradients[:1], rows=True)
    last = walk(make, stopped, rows=True)
    direction, further = (first - 1)[1], (last - first)[1]
    assert torch.cosine_similarity(direction, further, dim=0).item() == pytest.approx(1)


def test_a_parameter_without_gradient_is_left_alone(make: Make) -> None:
    seen, unseen = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
    optimizer = make([seen, unseen], weight_decay=0.1)
    seen.grad = torch.ones(3, 2)
    optimizer.step()
    assert torch.equal(unseen, torch.ones(3, 2))
    assert not optimizer.state[unseen]


@pytest.mark.parametrize("rows", [False, True])
def test_many_tensors_at_once_are_each_by_itself(make: Make, rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multilin.training.optimizers.base.CACHE_NUMBERS", 20)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    shapes = [(3, 2), (11, 3), (1, 1), (5, 2), (40, 1), (2, 25), (2, 2)]
    parameters = [nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in shapes]
    optimizer = make(parameters, rows=rows, weight_decay=0.1)
    gradients = [[draw(*shape, seed=10 * step + index) for index, shape in enumerate(shapes)] for step in range(3)]
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient
        optimizer.step()
    for index, parameter in enumerate(parameters):
        own = walk(make, [step[index] for step in gradients], rows=rows, weight_decay=0.1)
        torch.testing.assert_close(parameter.detach(), own, rtol=1e-14, atol=0)


def test_tensors_of_several_dtypes_are_each_by_itself(make: Make) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    gradients = [draw(7, 5, seed=seed, dtype=dtype) for seed, dtype in enumerate(dtypes)]
    parameters = [nn.Parameter(torch.ones_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    make(parameters).step()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert torch.equal(parameter, walk(make, [gradient], rows=False))


@pytest.mark.parametrize("rows", [False, True])
def test_the_learning_rate_may_be_a_tensor(make: Make, rows: bool) -> None:
    gradients = [draw(4, 3, seed=seed) for seed in range(3)]
    options = {"rows": rows, "weight_decay": 0.1}
    expected = walk(make, gradients, lr=0.125, **options)
    result = walk(make, gradients, lr=torch.tensor(0.125, dtype=torch.float64), **options)
    torch.testing.assert_close(result, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("rows", [False, True])
def test_bf16_gradients_follow_float32_ones(make: Make, rows: bool) -> None:
    gradients = [draw(6, 5, seed=seed).bfloat16() for seed in range(3)]
    expected = walk(make, [gradient.float() for gradient in gradients], rows=rows, lr=0.05)
    torch.testing.assert_close(walk(make, gradients, rows=rows, lr=0.05).float(), expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("rows", [False, True])
def test_a_loaded_state_lies_where_the_parameters_do(make: Make, rows: bool) -> None:
    """PyTorch leaves what is named `step` on the CPU, for its own optimizers."""
    saved, loaded = (nn.Parameter(torch.ones(3, 2, device=device)) for device in ("cpu", "meta"))
    optimizer, after = (make([parameter], rows=rows) for parameter in (saved, loaded))
    saved.grad = torch.ones(3, 2)
    optimizer.step()
    after.load_state_dict(optimizer.state_dict())
    assert {name for name, tensor in after.state[loaded].items() if not tensor.is_meta} == set()


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,), (3,), (), (2, 3, 4)])
def test_parameters_of_any_shape_move_and_go_on_from_a_state(make: Make, rows: bool, shape: tuple[int, ...]) -> None:
    optimizer = make([parameter := nn.Parameter(torch.ones(shape))], rows=rows)
    restored = make([other := nn.Parameter(torch.ones(shape))], rows=rows)
    for seed in range(2):
        parameter.grad = draw(*shape, seed=seed, dtype=torch.float32)
        optimizer.step()
    other.data.copy_(parameter.detach())
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = parameter.detach().clone()
    parameter.grad = other.grad = draw(*shape, seed=2, dtype=torch.float32)
    optimizer.step()
    restored.step()
    assert torch.equal(parameter, other)
    assert not parameter.numel() or not torch.equal(parameter, before)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_has_the_dtypes_of_a_new_one(make: Make, rows: bool, dtype: torch.dtype) -> None:
    """Also where the parameter had another dtype when the state was saved."""
    saved, loaded, new = (nn.Parameter(torch.ones(3, 2, dtype=x)) for x in (dtype, torch.bfloat16, torch.bfloat16))
    optimizer, restored, fresh = (make([parameter], rows=rows) for parameter in (saved, loaded, new))
    for parameter, its_optimizer in ((saved, optimizer), (new, fresh)):
        parameter.grad = torch.ones_like(parameter)
        its_optimizer.step()
    restored.load_state_dict(optimizer.state_dict())
    expected = {name: tensor.dtype for name, tensor in fresh.state[new].items()}
    assert {name: tensor.dtype for name, tensor in restored.state[loaded].items()} == expected
    loaded.grad = torch.ones_like(loaded)
    restored.step()


def test_matrix_moment_refuses_a_state_of_normalized_sgd() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    optimizer = NormalizedSGD([parameter])
    optimizer.step()
    with pytest.raises(InputError, match=r"the given state lacks momentum, second_moment, weight, so it was not saved"):
        MatrixMoment([parameter]).load_state_dict(optimizer.state_dict())


def test_the_state_of_another_optimizer_is_refused(make: Make) -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    adam = torch.optim.AdamW([parameter])
    adam.step()
    with pytest.raises(InputError, match=r"optimizer: the given state lacks .*rows.*, so it was not saved by"):
        make([parameter]).load_state_dict(adam.state_dict())


def test_a_sparse_gradient_is_refused_before_anything_moves(make: Make) -> None:
    embedding, other = nn.Embedding(5, 3, sparse=True), nn.Parameter(torch.ones(2, 2))
    embedding(torch.tensor([1, 2])).sum().backward()
    other.grad = torch.ones(2, 2)
    muon = Muon([{"params": [other], "matrices": True}, {"params": embedding.parameters(), "matrices": False}])
    for optimizer in (make([{"params": [other]}, {"params": embedding.parameters(), "rows": True}]), muon):
        with pytest.raises(InputError, match="takes dense gradients"):
            optimizer.step()
    assert torch.equal(other, torch.ones(2, 2))


@pytest.mark.parametrize(("name", "value"), [("row_average", 1.0), ("row_average", -0.1), ("row_order", "sideways")])
def test_bad_settings_are_named(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{name}: {value!r} given, but it must be"):
        NormalizedSGD([nn.Parameter(torch.ones(2))], **{name: value})


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), torch.tensor(-1.0)])
@pytest.mark.parametrize("name", ["lr", "weight_decay"])
@pytest.mark.parametrize("kind", [NormalizedSGD, MatrixMoment, Muon])
def test_rates_out_of_range_are_refused(kind: Make, name: str, value: Any) -> None:
    group = {"params": [nn.Parameter(torch.ones(2, 2))], "matrices": True}
    for arguments in ({"params": [group], name: value}, {"params": [{**group, name: value}]}):
        with pytest.raises(InputError, match=f"^{name}: .* given, but it must be at least 0 and finite"):
            kind(**arguments)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    states = [slot for state in optimizer.state.values() for slot in state.values()]
    return sum(slot.numel() * slot.element_size() for slot in states)


def test_the_state_is_about_half_of_adams_or_less() -> None:
    model = create_model("tscale", hidden_size=64, num_layers=2, vocab_size=300, n_positions=32)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    names = [name for name, _ in model.named_parameters()]
    groups = parameter_groups(model, decayed=names, weight_decay=0.1, by_rows=True)
    adam, moment, normalized = torch.optim.AdamW(model.parameters()), MatrixMoment(groups), NormalizedSGD(groups)
    for optimizer in (adam, moment, normalized):
        optimizer.step()
    assert state_bytes(moment) <= 0.55 * state_bytes(adam)
    assert state_bytes(normalized) == 4 * (2 * 64 * 300 + len(list(model.parameters())))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("trained", ["", "layers.0."], ids=["all", "one layer"])
def test_the_memory_of_an_optimizer_is_that_of_what_is_trained(name: str, trained: str) -> None:
    model = create_model("tscale", hidden_size=16, num_layers=2, vocab_size=37, n_positions=32)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in parameter_name)
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    recipe = resolve_optimizer(OptimizerRecipe(name=name), training_defaults("tscale"))
    optimizer = build_optimizer(recipe, model, decayed=())
    optimizer.step()
    slots = [(parameter, slot) for parameter, state in optimizer.state.items() for slot in state.values()]
    whole = sum(slot.nbytes for parameter, slot in slots if slot.shape == parameter.shape)
    assert optimizer_bytes(recipe, model) == whole


@pytest.mark.parametrize("architecture", model_names())
def test_rows_are_those_of_embedding_and_output(architecture: str) -> None:
    model = create_model(architecture, hidden_size=16, num_layers=1, vocab_size=37, n_positions=32)
    rows = {id(parameter) for parameter in row_parameters(model)}
    groups = parameter_groups(model, decayed=(), weight_decay=0.0, by_rows=True)
    by_row = [parameter for group in groups if group["rows"] for parameter in group["params"]]
    assert {id(parameter) for parameter in by_row} == rows
    assert all(parameter.shape == (37, 16) for parameter in by_row)
    assert len(by_row) == (1 if model.config.tie_word_embeddings else 2)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_layer_with_ten_times_the_initial_range_changes_by_ten_times_as_much(name: str) -> None:
    recipe = OptimizerRecipe(name=name, learning_rate=1e-4, weight_decay=0.0, **OPTIMIZERS[name].options)
    changes = []
    for own in ({}, {"initializer_range": 0.5}):
        layers = [{"architecture": "tscale", "head_size": 8, **own}, {"architecture": "additive", "num_heads": 2}]
        model = create_model(
            "additive", hidden_size=16, layers=layers, vocab_size=37, n_positions=32, initializer_range=0.05
        )
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = draw(*parameter.shape, seed=index, dtype=parameter.dtype)
        optimizer = build_optimizer(recipe, model, decayed=())
        assert optimizer.param_groups[0]["lr"] == 1e-4  # the rate that is reported
        optimizer.step()
        changes.append([after.detach() - old for after, old in zip(model.parameters(), before, strict=True)])
    names = [name for name, _ in model.named_parameters()]
    for name, plain, scaled in zip(names, *changes, strict=True):
        factor = 10 if name.startswith("model.layers.0.") else 1
        torch.testing.assert_close(scaled, factor * plain, rtol=1e-3, atol=2e-6, msg=name)


def test_a_layer_that_begins_with_zeros_learns() -> None:
    layers = [{"architecture": "additive", "num_heads": 2, "initializer_range": 0}]
    model = create_model("additive", hidden_size=16, layers=layers, vocab_size=37, n_positions=32)
    recipe = OptimizerRecipe(name="adamw", learning_rate=1e-4, weight_decay=0.0, **OPTIMIZERS["adamw"].options)
    optimizer = build_optimizer(recipe, model, decayed=())
    assert {group["lr"] for group in optimizer.param_groups} == {1e-4}


def test_recipes_name_every_optimizer() -> None:
    with pytest.raises(InputError) as refusal:
        load_recipe(None, {"optimizer.name": "nonsense"})
    assert all(repr(name) in str(refusal.value) for name in OPTIMIZERS)


def muon_of(model: nn.Module, **options: Any) -> Muon:
    groups = parameter_groups(model, decayed=(), weight_decay=0.0, by_rows=False, by_matrices=True)
    return Muon(groups, **options)


def backward(model: Any, seed: int) -> None:
    ids = torch.randint(300, (2, 32), generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize("architecture", model_names())
def test_muon_is_for_the_weights_of_linear_layers_alone(architecture: str) -> None:
    model = create_model(architecture, hidden_size=16, num_layers=1, vocab_size=37, n_positions=32)
    matrices = matrix_parameters(model)
    embeddings = [id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()]
    assert all(parameter.ndim == 2 for parameter in matrices)
    assert not {id(parameter) for parameter in matrices} & {*embeddings, *map(id, row_parameters(model))}
    assert len(matrices) == {"linear_mixer": 0, "threelin": 5, "gpt2": 4, "llama": 7}.get(architecture, len(matrices))


def test_muon_changes_matrices_as_pytorchs_and_the_rest_as_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "has_bf16", lambda device: True)
    torch.manual_seed(0)
    model = create_model("gpt2", hidden_size=16, num_layers=1, vocab_size=300, n_positions=32)
    other = copy.deepcopy(model)
    matrices = matrix_parameters(other)
    rest = [p for p in other.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = [
        muon_of(model, lr=0.01),
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.01, weight_decay=0.0, betas=(0.9, 0.95), fused=True),
    ]
    for seed in range(3):
        for network in (model, other):
            torch.manual_seed(seed)  # of dropout
            backward(network, seed)
        for optimizer in optimizers:
            optimizer.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_muon_is_copied_takes_another_group_and_refuses_a_state_of_adamw() -> None:
    def step(optimizer: Muon) -> list[torch.Tensor]:
        for seed, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            parameter.grad = draw(*parameter.shape, seed=seed, dtype=torch.float32)
        optimizer.step()
        return [p for group in optimizer.param_groups for p in group["params"]]

    matrix, vector = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(3))
    optimizer = Muon([{"params": [matrix], "matrices": True}], lr=0.1)
    step(optimizer)
    optimizer.add_param_group({"params": [vector], "matrices": False})
    step(optimizer)
    assert not vector.eq(1).any()
    other = pickle.loads(pickle.dumps(optimizer))
    for one, two in zip(step(copy.deepcopy(optimizer)), step(other), strict=True):
        assert torch.equal(one, two)
    with pytest.raises(InputError, match=r"the given state lacks matrices, so it was not saved by Muon"):
        optimizer.load_state_dict(torch.optim.AdamW([{"params": [matrix]}, {"params": [vector]}]).state_dict())


def test_muon_asks_which_part_changes_a_group() -> None:
    vector, matrix = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, 4))
    with pytest.raises(InputError, match="a group lacks 'matrices'"):
        Muon([vector])
    optimizer = Muon([{"params": [matrix], "matrices": True}])
    with pytest.raises(InputError, match=r"a tensor of shape \(3,\) given, but Muon changes only matrices"):
        optimizer.add_param_group({"params": [vector], "matrices": True})
    assert len(optimizer.param_groups) == 1


def test_muon_iterates_in_float32_where_bf16_would_be_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "has_bf16", lambda device: False)
    layer = nn.Linear(16, 48, bias=False)
    before, gradient = layer.weight.detach().clone(), draw(48, 16, seed=1)
    layer.weight.grad = gradient.float()
    muon_of(layer, lr=0.01).step()
    exact = muon.orthogonalized(gradient) * 0.2 * 0.01 * 48**0.5
    torch.testing.assert_close(before.double() - layer.weight.detach().double(), exact, rtol=0, atol=2e-7)


@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
@pytest.mark.parametrize("is_native", [True, False], ids=["bf16", "float32"])
def test_a_matrix_of_muon_moves_by_about_the_learning_rate_in_every_direction(
    shape: tuple[int, int], is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon, "has_bf16", lambda device: is_native)
    layer = nn.Linear(*reversed(shape), bias=False)
    before = layer.weight.detach().clone()
    layer.weight.grad = draw(*shape, seed=1, dtype=torch.float32)
    muon_of(layer, lr=0.01).step()
    moved = torch.linalg.svdvals(layer.weight.detach() - before) / (0.2 * 0.01 * 48**0.5)
    assert moved.min() > 0.5
    assert moved.max() < 1.5
