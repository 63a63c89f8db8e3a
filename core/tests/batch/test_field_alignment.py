"""A column of all tokens stays one in every form of a batch, also where no row has a prompt to tell it by its shape."""

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise import Trajectory
from turnwise.batch.packed_batch import collate_packed
from turnwise.batch.rollout_batch import RolloutBatch, collate
from turnwise.errors import PluginError
from turnwise.record.column_specs import ColumnSpec
from turnwise_result_files import from_tensordict, load_batch, load_packed_batch, save_batch, to_tensordict
from turnwise_testing.inputs.small_episodes import assert_same_batches, episode

SPECS = [
    ColumnSpec(name=f"{tokens}_{len(shape)}", dtype="int16", fill=fill, shape=shape, tokens=tokens)
    for tokens, fill in (("all", -1), ("sampled", 0), ("none", 3))
    for shape in ((), (2,))
]


def record(num_prompt, num_response):
    """Return a record with each column."""
    made = Trajectory(range(num_prompt))
    made.add_action(range(num_response), [-0.5] * num_response)
    for spec in SPECS:
        size = num_response if spec.of_responses else num_prompt + num_response
        values = spec.filled(size)
        values[:] = torch.arange(10, 10 + size).reshape(-1, *[1] * len(spec.shape)).numpy()
        made = made.with_column(spec, values)
    return made


def forms(batch, packed, folder):
    """Yield the packed batch of a padded one in each way that a program gets it."""
    yield batch.packed()
    yield RolloutBatch.from_packed(packed).packed()
    yield batch.select(slice(None)).packed()
    yield batch.with_fields({"a_row": torch.arange(len(batch))}).packed()
    yield from_tensordict(to_tensordict(batch)).packed()
    save_batch(batch, folder / "batch.safetensors")
    yield load_packed_batch(folder / "batch.safetensors")
    yield load_batch(folder / "batch.safetensors").packed()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0, 0, 2]), st.integers(0, 3)), min_size=1, max_size=3),
    st.integers(0, 2),
    st.integers(0, 2),
)
def test_every_form_is_padded_alike(tmp_path_factory, sizes, more_prompt, more_response):
    """A batch that was packed, selected, saved or made a TensorDict is padded to other widths as one of the records."""
    episodes = [episode(record(*each), uid=str(number)) for number, each in enumerate(sizes)]
    widths = {
        "prompt_length": max(prompt for prompt, _ in sizes) + more_prompt,
        "response_length": max(response for _, response in sizes) + more_response,
    }
    expected = collate(episodes, pad_token_id=0, **widths)
    packed = collate_packed(episodes, pad_token_id=0)
    for found in forms(collate(episodes, pad_token_id=0), packed, tmp_path_factory.mktemp("batch")):
        kept = {name: tensor for name, tensor in found.fields.items() if name != "a_row"}
        padded = RolloutBatch.from_packed(evolve(found, fields=kept), **widths)
        ordered = evolve(padded, fields={name: padded.fields[name] for name in expected.fields})
        assert_same_batches(expected, ordered)
        for name, tensor in packed.fields.items():
            assert torch.equal(tensor, found.fields[name]), name
            assert packed.field_alignment[name] == found.field_alignment[name], name


def test_a_field_of_a_postprocessor():
    """Its shape decides, and a shape that no field has is refused."""
    batch = collate([episode(record(1, 2))], pad_token_id=0)
    found = batch.with_fields({"a": torch.zeros(1, 3), "b": torch.zeros(1, 2)})
    assert ("token", "response") == (found.packed().field_alignment["a"], found.packed().field_alignment["b"])
    with pytest.raises(PluginError, match="field 'c' has shape"):
        batch.with_fields({"c": torch.zeros(1, 4)})
