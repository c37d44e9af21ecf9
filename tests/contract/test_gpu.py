"""Every architecture on a card: logits, gradients and states of the same model on the CPU in float64."""

import pytest
import torch

from tests.contract.conftest import MakeModel, random_ids, read_in_pieces
from tests.ops.gpu.conftest import one_way  # noqa: F401

pytestmark = pytest.mark.gpu


def near(result: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    result, expected = result.detach().cpu().double(), expected.detach().cpu().double()
    return bool((result - expected).norm() <= tolerance * expected.norm())


def loss_and_gradient(model, compute, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and the gradients of all parameters as one vector."""
    loss = compute(input_ids=ids, labels=ids).loss
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, trained, materialize_grads=True)
    return loss, torch.cat([gradient.flatten() for gradient in gradients])


def test_logits_and_gradients(make_model: MakeModel) -> None:
    exact, model, ids = make_model(), make_model(torch.float32).cuda(), random_ids(2, 70)
    with torch.no_grad():
        assert near(model(ids.cuda()).logits, exact(ids).logits, 1e-4)
    expected, found = loss_and_gradient(exact, exact, ids), loss_and_gradient(model, model, ids.cuda())
    assert near(found[0], expected[0], 1e-5)
    assert near(found[1], expected[1], 1e-3)


def test_reading_in_pieces_is_reading_at_once(make_model: MakeModel) -> None:
    exact, model, ids = make_model(), make_model(torch.float32).cuda(), random_ids(2, 40)
    with torch.no_grad():
        logits, state = read_in_pieces(model, ids.cuda(), [1, 2, 20, 37, 38, 39])
        whole = exact(ids)
    assert near(logits, whole.logits, 1e-4)
    assert all(tensor.is_cuda for _, tensor in state.named_tensors())


def test_generated_tokens_are_the_cpus(make_model: MakeModel) -> None:
    exact, model, ids = make_model(), make_model(torch.float32).cuda(), random_ids(2, 5)
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(ids.cuda(), **options).cpu(), exact.generate(ids, **options))


def test_a_step_in_bf16_loses_what_it_loses_on_the_cpu(make_model: MakeModel) -> None:
    exact, ids = make_model(initial=True), random_ids(2, 70)
    expected, errors = loss_and_gradient(exact, exact, ids), {}
    for device in ("cpu", "cuda"):
        model = make_model(torch.float32, initial=True).to(device)
        with torch.autocast(device, torch.bfloat16):
            found = loss_and_gradient(model, model, ids.to(device))
        assert near(found[0], expected[0], 1e-2)
        errors[device] = float((found[1].cpu().double() - expected[1]).norm() / expected[1].norm())
    assert errors["cuda"] <= 1.5 * errors["cpu"]


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # float32 is what it compares
def test_a_compiled_step(make_model: MakeModel, request: pytest.FixtureRequest) -> None:
    if "-default" not in request.node.name and "hybrid" not in request.node.name:
        pytest.skip("variants differ in what the ops are given, not in what is compiled")
    model, ids = make_model(torch.float32).cuda(), random_ids(2, 70).cuda()
    expected = loss_and_gradient(model, model, ids)
    found = loss_and_gradient(model, torch.compile(model), ids)
    assert near(found[0], expected[0], 1e-5)
    assert near(found[1], expected[1], 1e-3)
