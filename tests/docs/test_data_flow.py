"""The pictures of the architectures tell the truth: what a layer declares as its data flow is what it does."""

import dataclasses
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import nn

from multilin import MultilinForCausalLM
from multilin.architectures import architectures
from multilin.layers.base import Layer, Layout
from multilin.model import MultilinConfig
from multilin.model.state_tree import named_tensors
from multilin.settings import field_help
from tests.docs.generator import data_flow, flow_layout, flow_picture, generate

WIDTH, LENGTH = 16, 5
VARIANTS = [
    pytest.param(name, dict(options), id=f"{name}-{variant}")
    for name, architecture in architectures().items()
    for variant, options in {"default": {}, **architecture.variants}.items()
]
every_architecture = pytest.mark.parametrize("name", architectures())
every_variant = pytest.mark.parametrize(("name", "options"), VARIANTS)


def steps_of(name: str) -> list:
    return data_flow.read_flow(architectures()[name].layer.__doc__)


def build_layers(name: str, options: dict[str, Any]) -> list[tuple[Layer, dict[str, Any]]]:
    """The layers of a small model with the options of each, in float64 and without weights that are zero."""
    config = MultilinConfig.from_architecture(
        name, hidden_size=WIDTH, num_layers=6, vocab_size=7, n_positions=32, options=options, initializer_range=0.3
    )
    torch.manual_seed(0)
    model = MultilinForCausalLM(config).double().eval()
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.3)
    return list(zip(model.model.layers, config.layers, strict=True))


def find(layer: Layer, part: str) -> Any:
    """A module, a parameter or an op of the layer; None if it has no such part."""
    found: Any = layer
    for name in part.split("."):
        found = getattr(found, name, None)
    return None if isinstance(found, nn.Identity) else found


def active_steps(layer: Layer, steps: list) -> list:
    """Those whose parts this layer has; a step without parts goes with what follows it."""
    return [step for step in steps if all(find(layer, part) is not None for part in step.parts)]


@every_architecture
def test_each_declares_its_flow(name: str) -> None:
    text = "the layer's docstring has no line with arrows and a step `time label [parts] {state}`"
    assert any(step.kind == "time" and step.state for step in steps_of(name)), text


@every_architecture
def test_parts_exist(name: str) -> None:
    steps, variants = steps_of(name), architectures()[name].variants.values()
    layers = [layer for layer, _ in build_layers(name, {})]
    others = layers + [layer for options in variants for layer, _ in build_layers(name, dict(options))]
    for step in steps:
        options = step.optional_parts + step.parts * step.is_option
        for part in set(step.parts) - set(options):
            assert all(find(layer, part) is not None for layer in layers), f"{part} is missing"
        for part in options:
            assert any(find(layer, part) is not None for layer in others), f"no variant has {part}"
            assert all(find(layer, part) is None for layer in layers), f"{part} needs no option"


@every_variant
def test_no_parameter_is_left_out(name: str, options: dict) -> None:
    parts = {part for step in steps_of(name) for part in step.parts + step.optional_parts}
    for layer, _ in build_layers(name, options):
        for parameter, _ in layer.named_parameters():
            assert any(f"{parameter}.".startswith(f"{part}.") for part in parts), f"{parameter} is in no step"


def watched(layer: Layer, steps: list, x_BTD: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The modules that the steps name, in the order in which the layer calls them, each with what it gave; then x."""
    calls: list[tuple[str, torch.Tensor]] = []
    parts = {part: find(layer, part) for step in steps for part in step.parts}

    def watch(part: str):
        return lambda module, inputs, output: calls.append((part, output[0] if isinstance(output, tuple) else output))

    hooks = [m.register_forward_hook(watch(part)) for part, m in parts.items() if isinstance(m, nn.Module)]
    result_BTD, _ = layer(x_BTD, None, Layout(torch.arange(LENGTH)[None]))
    calls.append(("x", result_BTD.clone()))  # a clone, as it may be the very tensor that a module gave
    for hook in hooks:
        hook.remove()
    return calls


def met(steps: list, active: list) -> Iterator[tuple[str, bool]]:
    """Each part in order, and whether what its step gives has seen other positions, if the flow is right."""
    seen: dict[str, bool] = {}
    for step in steps:
        if step in active:
            has_met = step.kind == "time" or any(seen.get(value, False) for value in step.inputs)
            yield from ((part, has_met) for part in step.parts)
        else:
            has_met = seen.get(step.inputs[0], False)
        seen |= dict.fromkeys(step.outputs, has_met)


@every_variant
def test_positions_meet_where_the_picture_says(name: str, options: dict) -> None:
    steps = steps_of(name)
    for layer, _ in build_layers(name, options):
        active = active_steps(layer, steps)
        x_BTD = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64)
        changed_BTD = x_BTD.clone()
        changed_BTD[:, 0] += torch.randn(WIDTH, dtype=torch.float64)
        modules = [(p, has_met) for p, has_met in met(steps, active) if isinstance(find(layer, p), nn.Module)]
        calls, others = watched(layer, active, x_BTD), watched(layer, active, changed_BTD)
        for part in {part for part, _ in modules}:
            results = [(a, b) for (called, a), (_, b) in zip(calls, others, strict=True) if called == part]
            declared = [has_met for named, has_met in modules if named == part]
            assert len(results) == len(declared), f"{part} runs {len(results)} times, drawn are {len(declared)}"
            for (result, other), has_met in zip(results, declared, strict=True):
                unchanged = torch.equal(result[:, 1:], other[:, 1:])
                assert unchanged != has_met, f"{part} depends on earlier tokens: {not unchanged}, drawn is {has_met}"


def ancestors(steps: list, active: list) -> list[set[int]]:
    """For each active step, the numbers of the active steps that it follows from."""
    sources: dict[str, set[int]] = {}
    result = []
    for step in steps:
        read = set().union(*(sources.get(value, set()) for value in step.inputs))
        if step in active:
            read = read | {len(result)}
            result.append(read)
        else:
            read = sources.get(step.inputs[0], set())
        sources |= dict.fromkeys(step.outputs, read)
    return result


@every_variant
def test_values_go_where_the_lines_go(name: str, options: dict) -> None:
    steps = steps_of(name)
    for layer, _ in build_layers(name, options):
        active = active_steps(layer, steps)
        follows = ancestors(steps, active)
        calls = watched(layer, active, torch.randn(1, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True))
        results: dict[int, torch.Tensor] = {}
        parameters: dict[int, torch.Tensor] = {}
        for number, step in enumerate(active):
            for part in step.parts:
                if isinstance(find(layer, part), nn.Module):
                    index = next(index for index, (called, _) in enumerate(calls) if called == part)
                    results[number] = calls.pop(index)[1]
                elif isinstance(find(layer, part), nn.Parameter):
                    parameters[number] = find(layer, part)
        results.setdefault(len(active) - 1, calls.pop()[1])
        sources = results | parameters
        for sink, result in results.items():
            gradients = torch.autograd.grad(result.sum(), list(sources.values()), retain_graph=True, allow_unused=True)
            found = {source for source, gradient in zip(sources, gradients, strict=True) if gradient is not None}
            declared = follows[sink] & set(sources)
            real, drawn = ([active[source].label or active[source].outputs for source in s] for s in (found, declared))
            assert found == declared, f"{active[sink].outputs} depends on the steps {real}, drawn are {drawn}"


@every_variant
def test_state_has_the_declared_size(name: str, options: dict) -> None:
    for layer, chosen in build_layers(name, options):
        head_size = chosen.get("head_size") or WIDTH
        num_heads = chosen.get("num_heads") or WIDTH // head_size
        symbols = {**chosen, "D": WIDTH, "H": num_heads, "head_size": head_size}
        symbols["value_size"] = chosen.get("value_size") or WIDTH // num_heads
        symbols["query_size"] = chosen.get("query_size") or WIDTH // 2
        x_BTD = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64)
        _, state = layer(x_BTD, None, Layout(torch.arange(LENGTH)[None]))
        numbers = sum(tensor.numel() for _, tensor in named_tensors(state, ""))
        declared = data_flow.state_numbers(active_steps(layer, steps_of(name)), symbols)
        assert numbers == declared, f"the state has {numbers} numbers, declared are {declared}"


@every_architecture
def test_no_line_crosses_a_box_and_no_boxes_overlap(name: str) -> None:
    picture = flow_layout.lay_out(steps_of(name))
    for one, other in combinations(picture.nodes, 2):
        apart = abs(one.centre - other.centre) >= (one.width + other.width) / 2 + 4
        assert apart or abs(one.middle - other.middle) >= (one.height + other.height) / 2 + 4
    for edge in picture.edges:
        points = flow_layout.path_of(picture, edge)
        assert all(x0 == x1 or y0 == y1 for (x0, y0), (x1, y1) in pairwise(points))
        for (x0, y0), (x1, y1) in pairwise(points):
            for node in picture.nodes:
                if node is not edge.reader and node is not edge.value.node:
                    beside = max(x0, x1) <= node.left or min(x0, x1) >= node.left + node.width
                    assert beside or max(y0, y1) <= node.top or min(y0, y1) >= node.top + node.height
    for node in picture.nodes:
        assert node.left >= 0
        assert node.left + node.width <= picture.width
        assert node.is_circle or node.step is None or flow_layout.text_width(node.step.label, 14) <= node.width


@every_architecture
def test_pictures_stand_alone_and_know_both_themes(name: str) -> None:
    text = flow_picture.draw("A & B", steps_of(name))
    root = ElementTree.fromstring(text)
    assert root.find("{*}title").text.endswith("A & B")
    assert "prefers-color-scheme: dark" in text
    assert text.count("http") == 1  # the namespace
    assert text == flow_picture.draw("A & B", steps_of(name))


def test_without_a_flow_the_page_has_no_picture() -> None:
    architecture = next(iter(architectures().values()))
    page = generate.architecture_page(dataclasses.replace(architecture, layer=lambda hidden_size, options: None))
    assert ".svg" not in page
    assert "## State" in page


@every_architecture
def test_pages_have_their_sections(name: str) -> None:
    page = generate.architecture_page(architectures()[name])
    assert "## State\n\nMeasured" not in page, "the docstring of the file has no paragraph that starts with `State:`"
    sections = ["Data flow", "State", "Limits", "When to use it", "Options of a model", "Options of a layer", "Source"]
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == sections


@every_architecture
def test_options_have_comments(name: str) -> None:
    architecture = architectures()[name]
    for options in (architecture.options, architecture.preset_options):
        assert all(field_help(options).values()), f"a field of {options.__name__} has no comment, which is its help"


def test_a_value_that_nothing_gives_is_refused() -> None:
    with pytest.raises(ValueError, match="reads k, which no line before gives"):
        data_flow.read_flow("x * k -> u\nx -> linear K [key] -> k")


@pytest.mark.parametrize("box", ["N", "mix N [norm]", "norm [norm]", "norm N [norm", "norm N {D} [norm]"])
@pytest.mark.parametrize("line", ["x -> {} -> h", "x -> norm N [norm] -> y -> {} -> h"])
def test_a_step_that_is_none_is_refused(line: str, box: str) -> None:
    with pytest.raises(ValueError, match="is not 'kind label"):
        data_flow.read_flow(line.format(box))


def test_a_line_that_ends_in_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="does not end with the name of a value"):
        data_flow.read_flow("x -> norm N [norm] -> h -> map relu")


def test_values_named_inside_a_line_are_those_of_lines_of_their_own() -> None:
    together = data_flow.read_flow("x + x -> h -> norm N [norm] -> map relu -> y -> linear A [a] -> z")
    apart = data_flow.read_flow("x + x -> h\nh -> norm N [norm]\n    -> map relu -> y\ny -> linear A [a] -> z")
    assert together == apart
    assert [(step.inputs, step.outputs) for step in together] == [
        (("x", "x"), ("h",)), (("h",), ("y",)), (("y",), ("y",)), (("y",), ("z",))
    ]  # fmt: skip


def test_a_docstring_without_arrows_has_no_flow() -> None:
    assert data_flow.read_flow("A layer.\n\nIt has no arrows.") == []
