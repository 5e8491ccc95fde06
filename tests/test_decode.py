"""`speckv decode`, from the command line to the last word."""

import io
import re

import pytest
from click.testing import CliRunner

from speckv import SpecKVError
from speckv.cli import main
from speckv.plugins import make_policy
from speckv.saving import load_policy, save_policy


@pytest.fixture
def decode(small_pair_paths):
    def run(*arguments, draft=True, **kwargs):
        pair = ["--target", small_pair_paths.target, "--compression", "fp32", "--max-new-tokens", "24"]
        if draft:
            pair += ["--draft", small_pair_paths.draft, "--draft-compression", "fp32"]
        return CliRunner().invoke(main, ["decode", *pair, *arguments], **kwargs)

    return run


def test_text_summary_and_speed_up(decode):
    done = decode("--prompt", "Hello there", "--no-speculation", "--policy", "fixed:gamma=3")
    assert done.exit_code == 0, done.output
    *text, summary, alone = done.output.rstrip("\n").split("\n")
    assert "".join(text)
    found = re.search(
        r"fixed-3: 24 tokens .* tokens/s; accepted (\d+)% of drafted, .*gamma x steps: (.*); ended", summary
    )
    assert found and sum(int(part.split("x")[1]) for part in found[2].split()) > 0
    assert re.search(r"tokens/s, the same text; speed-up \d", alone)


def test_drafted_tokens_are_green(decode):
    coloured = decode("--prompt", "Hello there", "--policy", "fixed:gamma=4", color=True).output
    plain = decode("--prompt", "Hello there", "--policy", "none", color=True).output
    assert "\x1b[32m" in coloured and "\x1b[32m" not in plain


def test_prompt_from_standard_input(decode):
    assert (
        decode("--prompt", "-", input="7 * 8 =").output.splitlines()[0]
        == (decode("--prompt", "7 * 8 =").output.splitlines()[0])
    )


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_standard_input_that_is_no_text(errors, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), "utf-8", errors))
    with pytest.raises(SystemExit, match="2"):
        main(["decode", "--target", "none", "--draft", "none", "--prompt", "-"])
    assert "speckv: error: standard input is not text (" in capsys.readouterr().err


def test_the_log_and_the_policy_at_one_place(decode, tmp_path):
    done = decode("--prompt", "Hello", "--save-policy", str(tmp_path / "x"), "--log", str(tmp_path / "x"))
    assert done.exit_code == 2 and "x: is to be written twice" in done.output


@pytest.mark.parametrize("drafter", ["early-exit:layers=1", "prompt-lookup", "prompt-lookup:longest=2"])
def test_other_drafters(decode, drafter):
    assert decode("--prompt", "Hello", "--drafter", drafter, draft=False).exit_code == 0


def test_gumbel_text_depends_on_the_seed_alone(decode):
    options = ["--prompt", "Hello", "--sampling", "gumbel", "--temperature", "0.8"]
    labels = {"none": "none", "fixed:gamma=2": "fixed-2", "fixed:gamma=5": "fixed-5"}
    texts = {decode(*options, "--policy", name).output.split(f"\n{label}")[0] for name, label in labels.items()}
    assert len(texts) == 1
    assert decode(*options, "--policy", "none", "--seed", "1").output.split("\nnone")[0] not in texts


def test_a_full_disk_takes_the_log_and_not_what_was_learned(decode, tmp_path, monkeypatch):
    def full(*_):
        raise SpecKVError("no space left")

    monkeypatch.setattr("speckv.steplog_writer.write_columns", full)
    folders = ["--log", str(tmp_path / "log"), "--save-policy", str(tmp_path / "learned")]
    done = decode("--prompt", "Hello", "--policy", "ucb1", *folders)
    assert done.exit_code == 2 and "no space left" in done.output
    assert load_policy(tmp_path / "learned").name == "ucb1"


def test_a_saved_policy(decode, tmp_path):
    save_policy(make_policy("fixed:gamma=2"), tmp_path / "saved")
    assert "2x" in decode("--prompt", "Hello", "--policy", str(tmp_path / "saved")).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "prompt-lookup"], "give one of --draft and --drafter"),
        (["--policy", "hazard"], "has no target in fp32"),
        (["--policy", "fixd"], "did you mean 'fixed'"),
        (["--policy", "oracle"], "knows the future"),
        (["--temperature", "0.5"], "greedy decoding takes no temperature"),
        (["--sampling", "rejection", "--temperature", "0"], "temperature is 0.0; it must be from 0.0001 (0 is greedy"),
        (["--min-new-tokens", "30"], "min_new_tokens is 30"),
        (["--stop", ""], "a list of strings of at least one character"),
        (["--policy", "fixed:gamma=20"], "plays gamma 20, above the --gamma-max of 16; raise that, or choose another"),
        (["--gamma-max", "2"], "plays gamma 4, above the --gamma-max of 2; raise that, or choose another"),
        (["--prompt", "\udcff"], "--prompt is not text ("),
        (["--stop", "\udcff"], "--stop is not text ("),
        (["--device", "cuda:7"], "device 'cuda:7' can't be used here"),
        (["--compression", "int3"], "compression 'int3' is unknown"),
        (["--log", "x" * 300], "x: cannot be written (File name too long); choose another place"),
        (["--save-policy", "x" * 300], "x: cannot be written (File name too long); choose another place"),
    ],
)
def test_what_cannot_be_done_is_one_line(decode, arguments, message):
    done = decode("--prompt", "Hello", *arguments)
    assert done.exit_code == 2
    line = done.output.strip().split("\n")[-1]
    assert line.startswith("speckv: error: ") and message in line


def test_prompt_lookup_refuses_a_policy_that_needs_signals(decode):
    done = decode(
        "--prompt", "Hello", "--drafter", "prompt-lookup", "--policy", "confidence:threshold=0.4,cap=8", draft=False
    )
    assert done.exit_code == 2 and "'draft_probability', which PromptLookup cannot give" in done.output


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("promptlookup", "drafter 'promptlookup' is unknown; did you mean 'prompt-lookup'?"),
        ("prompt-lookup:size=3", "drafter 'prompt-lookup' has no parameter 'size'; it has longest, shortest"),
        ("prompt-lookup:longest=0", "longest is 0 and shortest 1"),
        ("early-exit", "drafter 'early-exit' can't be made with no parameters"),
        ("early-exit:layers=7", "has 2 layers; exit early after 1 to 1 of them, not 7"),
    ],
)
def test_a_drafter_that_cannot_be_made(decode, spec, message):
    done = decode("--prompt", "Hello", "--drafter", spec, draft=False)
    assert done.exit_code == 2 and message in done.output.strip().split("\n")[-1]
