"""New weights before they reach vLLM: which are refused, and that values arrive unchanged."""

import resource
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from turnwise.errors import EngineError
from turnwise.protocols.weights import StoredWeight, TensorSpec
from turnwise_engine_support.stored_weights import map_weights
from turnwise_engine_support.weight_checks import ExpectedWeights
from turnwise_vllm_engine.weights import stage

SHAPES = {
    "model.embed_tokens.weight": (8, 4),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.self_attn.k_proj.weight": (2, 4),
    "model.layers.0.self_attn.v_proj.weight": (2, 4),
    "model.layers.0.mlp.experts.0.up_proj.weight": (4, 4),
    "model.layers.0.mlp.experts.1.up_proj.weight": (4, 4),
    "model.norm.weight": (4,),
}
EXPECTED = ExpectedWeights(SHAPES, fused=[["q_proj", "k_proj", "v_proj"]], tied=True)
ALL = {name: np.full(shape, i, np.float32) for i, (name, shape) in enumerate(SHAPES.items())}


@pytest.fixture
def put(tmp_path):
    """A function that stages weights in a temporary folder."""

    staged = []

    def run(weights, expected=EXPECTED, bucket_bytes=1 << 20, whole=False):
        staged.append(stage(weights, expected, weight_dir=tmp_path, bucket_bytes=bucket_bytes, whole=whole))
        return staged[-1]

    yield run
    for each in staged:
        each.close()


def read(staged):
    """Return the staged weights as another process reads them."""
    return dict(map_weights(staged.places))


@pytest.mark.parametrize("bucket_bytes", [1, 64, 100, 1 << 20])
def test_all_weights_arrive(put, bucket_bytes):
    """Any bucket size works, no file has a name, and `close` frees all files."""
    staged = put(ALL.items(), bucket_bytes=bucket_bytes)

    found = read(staged)
    assert set(ALL) == set(found) == staged.names
    assert all(np.array_equal(ALL[name], found[name].numpy()) for name in ALL)
    assert sum(each.nbytes for each in ALL.values()) == staged.num_bytes
    assert (len(ALL) if bucket_bytes == 1 else 1) == len(staged.paths) or bucket_bytes in (64, 100)
    assert [] == list(staged.folder.iterdir())
    paths = staged.paths
    staged.close()
    assert not any(path.exists() for path in paths)


def test_views_are_copied(put):
    """A transport may reuse one buffer for every weight."""
    buffer = np.zeros(4, np.float32)

    def weights():
        for name, value in (("model.norm.weight", 1.0), ("model.other.weight", 2.0)):
            buffer[:] = value
            yield name, buffer

    found = read(put(weights(), ExpectedWeights({})))

    expected = {"model.norm.weight": [1.0] * 4, "model.other.weight": [2.0] * 4}
    assert expected == {name: array.tolist() for name, array in found.items()}


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_layout_and_dtype_do_not_matter(put, dtype):
    """A transposed view of any floating point type arrives with its shape and values."""
    array = np.arange(8, dtype=dtype).reshape(4, 2).T

    (found,) = read(put([("w", array)], ExpectedWeights({}))).values()

    assert (dtype, array.tolist()) == (found.numpy().dtype.name, found.tolist())


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_dtypes_that_numpy_lacks_arrive_unchanged(put, dtype):
    """Arrays of ml_dtypes and torch tensors give the same file."""
    array = np.array([1.5, -3.0, 0.25], getattr(ml_dtypes, dtype))
    tensor = torch.tensor([1.5, -3.0, 0.25]).to(getattr(torch, dtype))

    for weight in (array, tensor):
        found = read(put([("w", weight)], ExpectedWeights({})))["w"]
        assert torch.equal(tensor.float(), found.float())
        assert tensor.dtype == found.dtype


def test_torch_views_arrive(put):
    """A transposed tensor that requires gradients is copied."""
    tensor = torch.arange(6.0).reshape(2, 3).T.requires_grad_()

    assert torch.equal(tensor.detach(), read(put([("a", tensor)], ExpectedWeights({})))["a"])


class StoredSource:
    """Weights that a transport has received in a file, at multiples of 128 bytes."""

    def __init__(self, path, weights):
        self.stored, offset = [], 0
        for name, array in weights.items():
            self.stored.append(StoredWeight(TensorSpec(name, array.shape, array.dtype.name), str(path), offset))
            with path.open("ab") as file:
                file.write(array.tobytes().ljust(128, b"\0"))
            offset += 128
        self._weights = weights

    def __iter__(self):
        return iter(self._weights.items())


def test_weights_in_files_are_not_copied(put, tmp_path):
    """vLLM's processes map the file of the transport; a tied output layer is not loaded from it, either."""
    source = StoredSource(tmp_path / "received", ALL | {"lm_head.weight": ALL["model.embed_tokens.weight"]})

    staged = put(source)

    assert [] == staged.files
    assert {str(tmp_path / "received")} == {place[3] for place in staged.places}
    assert {name: array.tolist() for name, array in ALL.items()} == {
        name: tensor.tolist() for name, tensor in read(staged).items()
    }


def test_a_bad_weight_in_a_file_is_refused(put, tmp_path):
    """Weights that are not copied are checked like others."""
    with pytest.raises(EngineError, match=r"weight 'model.norm.weight' has shape \(4,\), got \(5,\)"):
        put(StoredSource(tmp_path / "received", {"model.norm.weight": np.zeros(5, np.float32)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.nrom.weight": np.zeros(4, np.float32)}, "no weight 'model.nrom.weight'; did you mean 'model.norm.wei"),
        ({"model.norm.weight": np.zeros(5, np.float32)}, r"weight 'model.norm.weight' has shape \(4,\), got \(5,\)"),
        ({"model.norm.weight": np.zeros(4, np.int8)}, "must be of floating point, got int8"),
        ({"lm_head.weight": np.zeros((4, 8), np.float32)}, r"has shape \(8, 4\), got \(4, 8\)"),
    ],
)
def test_one_bad_weight_refuses_the_update(put, tmp_path, change, message):
    """No file stays behind."""
    with pytest.raises(EngineError, match=message):
        put((ALL | change).items())

    assert [] == list(tmp_path.iterdir())


def test_a_weight_that_comes_twice_is_refused(put):
    """It is unknown which of the two is right."""
    with pytest.raises(EngineError, match=r"weight 'model.norm.weight' came twice"):
        put([*ALL.items(), ("model.norm.weight", ALL["model.norm.weight"])])


def test_fused_weights_come_together(put):
    """vLLM would fill the rest of a fused layer with uninitialised memory."""
    name = "model.layers.0.self_attn.q_proj.weight"

    with pytest.raises(EngineError, match=r"2 weights are missing, such as .*k_proj.*: the engine fuses them"):
        put([(name, ALL[name])])


def test_some_layers_are_fine(put):
    """An update may replace complete layers, and layers that vLLM does not fuse."""
    names = [name for name in ALL if "self_attn" in name or "norm" in name]

    assert set(names) == put([(name, ALL[name]) for name in names]).names


def test_all_weights_are_needed_after_level_2(put):
    """After a sleep freed the weights, none of them can be kept."""
    with pytest.raises(EngineError, match=r"1 weights are missing, such as 'model.norm.weight': the engine has no val"):
        put([(name, array) for name, array in ALL.items() if "norm" not in name], whole=True)
    assert set(ALL) == put(ALL.items(), whole=True).names


def test_a_tied_output_layer_is_not_sent(put):
    """A trainer's state dict contains it twice, vLLM and the model's files once."""
    table = ALL["model.embed_tokens.weight"]

    assert "lm_head.weight" not in put({**ALL, "lm_head.weight": table}.items()).names


def test_a_failing_source_leaves_no_files(put, tmp_path):
    """The error text contains the cause."""

    def weights():
        yield from list(ALL.items())[:2]
        raise ConnectionError("the trainer is gone")

    with pytest.raises(EngineError, match=r"^cannot read the new weights: ConnectionError: the trainer is gone$"):
        put(weights(), bucket_bytes=1)
    assert [] == list(tmp_path.iterdir())


def test_a_missing_folder_is_named():
    """The error is one line."""
    with pytest.raises(
        EngineError, match=r"cannot write 128 bytes of new weights to '/no/such/folder': \[Errno 2\] No such"
    ):
        stage(ALL.items(), EXPECTED, weight_dir=Path("/no/such/folder"), bucket_bytes=1, whole=False)


def test_a_full_disk_is_an_engine_error(put):
    """The error says how much did not fit and where."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, unlimited[1]))
    try:
        with pytest.raises(EngineError, match=r"cannot write 65536 bytes of new weights to .*: .* File too large"):
            put([("w", np.zeros(1 << 14, np.float32))], ExpectedWeights({}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


STAGING = """
import signal, sys
from pathlib import Path
import numpy as np
from turnwise_engine_support.weight_checks import ExpectedWeights
from turnwise_vllm_engine import weights
weights.SHARED_MEMORY = Path(sys.argv[1])
staged = weights.stage([("w", np.ones(4))], ExpectedWeights({}), weight_dir=None, bucket_bytes=1, whole=False)
print(staged.paths[0], flush=True)
signal.pause()
"""


def test_a_killed_process_leaves_no_weights(tmp_path):
    """Another process reads the weights; after a SIGKILL they are gone."""
    with subprocess.Popen([sys.executable, "-c", STAGING, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        path = process.stdout.readline().strip()
        try:
            assert [1.0] * 4 == np.fromfile(path).tolist()
        finally:
            process.send_signal(signal.SIGKILL)

    assert [] == list(tmp_path.iterdir())
    assert not Path(path).exists()
