"""Functions of GPU packages that the code relies on, read from the packages' sources: a release
that changes them fails here, without a GPU and without being installed.

The sources come from the package index that pip uses. FlashAttention-3 is on no index: its
operators are checked when they are first used (`kernels/flash_attn3.py`).
"""

import ast
import html
import io
import os
import re
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
from urllib.parse import urljoin

import pytest

from hf_flexseq.kernels.scans.choose import WRONG_ON_HOPPER

pytestmark = [pytest.mark.nightly, pytest.mark.processes]

NEWEST = "newest"
FLASH_SHARED = {
    *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "dropout_p", "causal"),
    *("softmax_scale", "window_size_left", "window_size_right", "softcap", "alibi_slopes"),
}
FLA_OPTIONS = {
    *("initial_state", "output_final_state", "use_qk_l2norm_in_kernel"),
    *("cu_seqlens", "cu_seqlens_cpu"),
}
LIGER_ORDER = [
    *("_input", "weight", "target", "bias", "ce_weight", "ignore_index", "lse_square_scale"),
    *("label_smoothing", "reduction", "softcap", "return_z_loss", "accum_dtype"),
]


def index():
    """The address of the package index that pip uses."""
    found = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return os.environ.get("PIP_INDEX_URL") or found or "https://pypi.org/simple"


def fetched(address):
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            return answer.read()
    except (urllib.error.URLError, OSError) as error:
        pytest.skip(f"no package index: {error}")


def in_order(version):
    """A version as a key to sort by: final releases after their candidates."""
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    return [*numbers, 0] if re.search(r"(a|b|rc|dev)\d", version) is None else [*numbers[:-1], -1]


@pytest.fixture(scope="module")
def sources():
    """(package, version) -> the text of each Python file by its path, and the version."""
    kept = {}

    def sources(package, version):
        if (package, version) in kept:
            return kept[package, version]
        page = f"{index().rstrip('/')}/{package}/"
        name = package.replace("-", "[-_]")
        links = re.findall(r'href="([^"#]+)[^"]*"[^>]*>\s*([^<\s]+)\s*<', fetched(page).decode())
        files = {}
        for address, file in links:
            found = re.fullmatch(rf"{name}-([^-]+?)(-py3-none-any\.whl|\.tar\.gz)", file)
            if found:
                files[found[1]] = html.unescape(address)
        assert files, f"{page} has no source of {package}"
        wanted = max(files, key=in_order) if version == NEWEST else version
        assert wanted in files, f"{package} {wanted} is gone: {sorted(files, key=in_order)}"
        archive = fetched(urljoin(page, files[wanted]))
        kept[package, version] = texts(archive), wanted
        return kept[package, version]

    return sources


def texts(archive):
    """The Python files of a wheel or a source archive."""
    found = {}
    if archive[:2] == b"PK":
        with zipfile.ZipFile(io.BytesIO(archive)) as wheel:
            for name in wheel.namelist():
                if name.endswith(".py"):
                    found[name] = wheel.read(name).decode()
        return found
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            if member.isfile() and member.name.endswith(".py"):
                text = tar.extractfile(member).read().decode()
                found[member.name.partition("/")[2]] = text
    return found


def text_at(files, path):
    """The text of a file, which may be in src/."""
    return next(text for file, text in files.items() if file.endswith(path))


def signature(files, path, name, of=None):
    """The names of the parameters of a function, of the class `of` where it is a method."""
    text = text_at(files, path)
    nodes = ast.walk(ast.parse(text))
    if of is not None:
        (owner,) = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == of]
        nodes = owner.body
    found = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name]
    assert found, f"{path} has no {name}"
    return [argument.arg for argument in (*found[0].args.args, *found[0].args.kwonlyargs)]


@pytest.mark.parametrize("version", ["2.7.0.post2", "2.7.4.post1", "2.8.3", NEWEST])
def test_flash_attn_takes_packed_sequences_by_these_names(sources, version):
    files, found = sources("flash-attn", version)
    path = "flash_attn/flash_attn_interface.py"
    forward = signature(files, path, "_flash_attn_varlen_forward")
    backward = signature(files, path, "_flash_attn_varlen_backward")
    assert forward[:3] == ["q", "k", "v"], found
    assert FLASH_SHARED | {"return_softmax"} <= set(forward), found
    assert backward[:6] == ["dout", "q", "k", "v", "out", "softmax_lse"], found
    assert FLASH_SHARED | {"dq", "dk", "dv", "deterministic"} <= set(backward), found
    # what the forward returns: out, log-sum-exp, and what its own autograd keeps
    assert re.search(r"return out, softmax_lse, S_dmask, rng_state", files[path]), found


@pytest.mark.parametrize("version", ["0.6.0", NEWEST])
@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("fla/ops/gated_delta_rule/chunk.py", "chunk_gated_delta_rule"),
        ("fla/ops/kda/chunk.py", "chunk_kda"),
    ],
)
def test_delta_rules_take_states_and_lengths_by_these_names(sources, version, path, name):
    files, found = sources("fla-core", version)
    parameters = signature(files, path, name)
    assert parameters[:5] == ["q", "k", "v", "g", "beta"], found
    assert set(parameters) >= FLA_OPTIONS, found
    # states are [H, K, V] unless it is asked for the transposed form
    assert "state_v_first" in parameters, found


@pytest.mark.parametrize("version", ["0.6.0", NEWEST])
def test_gated_linear_attention_takes_states_and_lengths_by_these_names(sources, version):
    # what Mamba 2 runs
    files, found = sources("fla-core", version)
    parameters = signature(files, "fla/ops/simple_gla/chunk.py", "chunk_simple_gla")
    assert parameters[:4] == ["q", "k", "v", "g"], found
    wanted = FLA_OPTIONS - {"use_qk_l2norm_in_kernel"} | {"scale", "state_v_first"}
    assert set(parameters) >= wanted, found


def test_the_compilers_that_the_delta_rules_refuse_are_those_that_are_not_used(sources):
    files, found = sources("fla-core", NEWEST)
    text = files["fla/ops/common/chunk_o.py"]
    refused = re.search(
        r"IS_NVIDIA_HOPPER and TRITON_ABOVE_([\d_]+) and not TRITON_ABOVE_([\d_]+)", text
    )
    assert refused, found
    bounds = tuple(tuple(int(n) for n in bound.split("_")) for bound in refused.groups())
    assert bounds == WRONG_ON_HOPPER, found


@pytest.mark.parametrize("version", ["0.19.0", NEWEST])
def test_axolotl_s_plugins_are_called_as_ours_answers(sources, version):
    # integrations/axolotl.py
    files, found = sources("axolotl", version)
    path = "axolotl/integrations/base.py"
    wanted = {
        "get_input_args": ["self"],
        "get_training_args": ["self", "cfg"],
        "add_callbacks_post_trainer": ["self", "cfg", "trainer"],
    }
    for method, parameters in wanted.items():
        assert signature(files, path, method, of="BasePlugin") == parameters, (found, method)
    # the model of a plugin's keys is imported by its dotted path, and comes after axolotl's own
    merging = text_at(files, "axolotl/integrations/config.py")
    assert 'plugin_args.rsplit(".", 1)' in merging, found
    assert "class AxolotlInputConfig(AxolotlInputConfigBase, {" in merging, found
    # both builders ask for training arguments before they make a trainer, and for callbacks after
    for builder in ("causal", "rl"):
        text = text_at(files, f"axolotl/core/builders/{builder}.py")
        asked = text.index("plugin_manager.get_training_args(self.cfg)")
        assert asked < text.rindex("self.get_post_trainer_create_callbacks(trainer)"), found
    # evaluations collate with this one
    trainer = text_at(files, "axolotl/core/trainers/base.py")
    assert "self.data_collator if is_training else self.eval_data_collator" in trainer, found
    text = text_at(files, "axolotl/core/builders/base.py")
    assert 'training_args_kwargs["average_tokens_across_devices"] = False' in text, found


@pytest.mark.parametrize("version", ["0.6.2", NEWEST])
def test_liger_s_loss_takes_its_arguments_in_this_order(sources, version):
    files, found = sources("liger-kernel", version)
    path = "liger_kernel/ops/fused_linear_cross_entropy.py"
    forward = signature(files, path, "forward", of="LigerFusedLinearCrossEntropyFunction")
    assert forward[1:13] == LIGER_ORDER, found


@pytest.mark.parametrize("version", ["4.6.0", NEWEST])
def test_ms_swift_names_the_trainer_of_a_task_and_makes_it_so(sources, version):
    files, found = sources("ms-swift", version)
    factory = files["swift/trainers/trainer_factory.py"]
    assert "'causal_lm': 'swift.trainers.Seq2SeqTrainer'" in factory, found
    assert re.search(r"module_path, class_name = mapping\[\w+\]\.rsplit\('\.', 1\)", factory), (
        found
    )
    made = signature(files, "swift/trainers/mixin.py", "__init__", of="SwiftMixin")
    assert made[:6] == ["self", "model", "args", "template", "train_dataset", "eval_dataset"], (
        found
    )
    template = files["swift/template/base.py"]
    for name in ("is_binary_loss_scale", "sequence_parallel_size"):
        assert f"self.{name} = " in template, (name, found)
    # packed rows: examples are lists, positions begin again, and no first token has a label
    for line in (
        "batch = sum(batch, start=[])",
        "packed['position_ids'] = sum((list(range(x)) for x in length), start=[])",
        "encoded['labels'][0] = -100",
    ):
        assert line in template, (line, found)
    assert "def get_base_model(" in template, found
    arguments = files["swift/trainers/arguments.py"]
    for name in ("enable_dft_loss", "enable_channel_loss", "loss_type", "router_aux_loss_coef"):
        assert re.search(rf"^    {name}: ", arguments, re.MULTILINE), (name, found)
    own = files["swift/trainers/seq2seq_trainer.py"]
    replaced = ("compute_loss", "prediction_step", "training_step", "_prepare_inputs")
    methods = set(re.findall(r"^    def (\w+)\(", own, re.MULTILINE))
    looked_at = {"__init__", "_predict_data_collator", "_patch_predict_with_generate", "evaluate"}
    assert methods == looked_at | set(replaced), found
