"""Settings are recommended by what they do on prompts that they were not chosen on."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest
from click.testing import CliRunner

from speckv.cli import main
from speckv.comparison import REQUIRED, compare
from speckv.errors import SpecKVError
from speckv.exporters.assisted import AssistedExporter, AssistedThresholdExporter
from speckv.exporters.settings import Setting
from speckv.plugins import make_policy
from speckv.policy import Policy
from speckv.recommending import recommend
from speckv.replaying import replay
from speckv_policies.thresholds import Confidence

from .synthetic import make_costs, make_rollouts, make_sequences, write_dataset
from .test_batch_costs import of_batches

GAMMAS = range(9)
FREE = {name: (0.0, 0.0) for name in ("none", "best-fixed", "confidence", *(f"constant-{gamma}" for gamma in GAMMAS))}


class Tuned(AssistedThresholdExporter):
    """With the choices of the tuned confidence rule."""

    caps = Confidence.CAPS
    thresholds = Confidence.THRESHOLDS


def constant(gamma):
    """A policy without parameters: of those with some, decision times are measured anew."""

    class Constant(Policy):
        name = f"constant-{gamma}"

        def choose_gamma(self, features, state):
            return gamma

    return Constant()


@pytest.fixture(scope="module")
def traces():
    return make_rollouts(prompts=15, gamma_max=8, budget=40, seed=4)


@pytest.fixture(scope="module")
def costs():
    return make_costs(draft=0.02, controller=FREE)


def row_of(result, compression):
    (row,) = (row for row in result.rows if row.compression == compression)
    return row


def test_what_is_expected_is_what_a_comparison_says(traces, costs):
    """The decoder with the fastest setting is the tuned confidence rule, the policies are the best fixed gamma; both
    are chosen on the other folds there, too."""
    result = recommend(Tuned(), traces, costs, list(map(constant, GAMMAS)), seed=3)
    specs = ["confidence", *("fixed:gamma=4" if name == "fixed-4" else name for name in REQUIRED)]
    table = compare(list(map(make_policy, specs)), traces, [costs], seed=3, against="confidence")
    assert [row.compression for row in result.rows] == ["bf16", "nf4", "all"]
    for row in result.rows:
        cells = {cell.policy: cell for cell in table.cells if cell.compression == row.compression}
        assert row.throughput == pytest.approx(cells["confidence"].throughput)
        assert row.judge == pytest.approx(cells["perfect-judge"].throughput)
        assert row.on_top.gain == pytest.approx(cells["best-fixed"].gain)
        assert row.on_top.ci == pytest.approx(cells["best-fixed"].gain_ci)
        assert 1 / (1 + row.over_plain.gain) - 1 == pytest.approx(cells["none"].gain)
        assert row.throughput_ci[0] < row.throughput < row.throughput_ci[1]
    whole = Confidence().fit(traces, costs).fitted
    for code, name in ((1, "bf16"), (4, "nf4")):
        setting = Tuned().from_native(row_of(result, name).setting)
        assert setting == Setting(int(whole["cap"][code]), float(whole["threshold"][code]))
        best = make_policy("best-fixed").fit(traces, costs).fitted["gamma"][code]
        assert row_of(result, name).policy == f"constant-{best}"


def test_a_policy_that_does_what_the_setting_does_gains_nothing(traces, costs):
    row = row_of(recommend(Tuned(), traces, costs, [make_policy("confidence")]), "all")
    assert row.on_top.gain == pytest.approx(0, abs=1e-12) and row.on_top.ci == pytest.approx((0, 0), abs=1e-12)
    assert row.on_top.p == 1.0


def test_the_default_is_played_as_it_is(traces, costs):
    result = recommend(Tuned(), traces, costs)
    default = replay(Tuned().played(Setting(20, 0.4)), traces, costs).throughput
    row = row_of(result, "all")
    assert row.over_default.gain == pytest.approx(row.throughput / default - 1)
    assert result.about["cut"] and (row.policy, row.on_top) == (None, None)

    moving = replay(make_policy("adaptive-confidence:threshold=0.4,cap=20"), traces, costs).throughput
    row = row_of(recommend(AssistedExporter(), traces, costs), "all")
    assert row.over_default.gain == pytest.approx(row.throughput / moving - 1) and abs(moving / default - 1) > 0.01

    class Silent(Tuned):
        default = None

    result = recommend(Silent(), traces, costs)
    assert row_of(result, "all").over_default is None and not result.about["cut"]


def test_expectations_are_not_the_best_of_many_on_the_same_prompts(costs):
    """Where signals tell nothing, many settings are as good as one, and the best in hindsight is luck."""
    traces = make_rollouts(prompts=12, gamma_max=8, budget=30, seed=1)
    random = np.random.default_rng(0)
    noise = {name: random.random(values.shape).astype(np.float32) for name, values in traces.signals.items()}
    traces = dataclasses.replace(traces, signals=noise)
    result = recommend(Tuned(), traces, costs)
    luck = []
    for name in ("bf16", "nf4"):
        part, row = traces.take(traces.compressions == name), row_of(result, name)
        speeds = {setting: replay(Tuned().played(setting), part, costs).throughput for setting in Tuned().candidates(8)}
        assert speeds[Tuned().from_native(row.setting)] == max(speeds.values())
        luck.append(max(speeds.values()) / row.throughput - 1)
    assert min(luck) > -1e-9 and max(luck) > 0.005


def test_a_single_prompt_says_nothing_of_others():
    traces = make_rollouts(prompts=6, gamma_max=8, budget=30, seed=2)
    first, *others = np.unique(traces.compressions).tolist()
    kept = np.isin(traces.compressions, others)
    kept[np.flatnonzero(traces.compressions == first)[0]] = True
    with pytest.raises(SpecKVError, match=f"holds one prompt at {first}"):
        recommend(Tuned(), traces.take(kept), make_costs())


def test_a_batch_is_as_many_times_as_fast():
    traces, costs = make_rollouts(prompts=6, gamma_max=8, budget=30, seed=2), of_batches(1, 4)
    costs = dataclasses.replace(costs, controller=FREE)
    of_four = dataclasses.replace(costs.at_batch(4), batch_size=1)
    batch = recommend(Tuned(), traces, costs, [constant(1)], batch_size=4)
    one = recommend(Tuned(), traces, of_four, [constant(1)])
    for row, alone in zip(batch.rows, one.rows, strict=True):
        assert row.throughput == pytest.approx(4 * alone.throughput) and row.judge == pytest.approx(4 * alone.judge)
        assert row.throughput_ci == pytest.approx(tuple(4 * end for end in alone.throughput_ci))
        assert (row.setting, row.on_top) == (alone.setting, alone.on_top)
    with pytest.raises(SpecKVError, match="was measured for batches of 1 to 4 sequences, not of 5"):
        recommend(Tuned(), traces, costs, batch_size=5)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("place")
    write_dataset(place / "traces", make_sequences(prompts=6, budget=20), budget=20)
    make_costs(controller=FREE | {"svip": (0.0, 0.0)}).save(place / "costs.json")
    return place


def run(place, *arguments):
    data = ["--traces", str(place / "traces"), "--costs", str(place / "costs.json")]
    return CliRunner().invoke(main, ["recommend", *data, *arguments])


def test_on_the_command_line(place):
    asked = ["--decoder", "transformers", "--policy", "svip", "--compression", "nf4", "--folds", "2"]
    done = run(place, *asked)
    assert done.exit_code == 0, done.output
    value = json.loads(run(place, *asked, "--json").stdout)
    assert (value["format"], value["schema_version"]) == ("speckv-recommendation", 1)
    (row,) = value["rows"]
    assert f"nf4: {row['paste']}\n" in done.stdout
    assert row["paste"].startswith("draft.generation_config.update(num_assistant_tokens=")
    assert row["policy"] == "svip" and f"{100 * row['on_top']['gain']:+.1f} %" in done.stdout
    assert value["about"]["prompts"] == 6 and "ask about assisted-threshold" in done.stdout
    assert "Chosen among 9 settings and 1 policy;" in done.stdout
    assert "speckv export POLICY --to assisted --approximate" in done.stdout
    asked[1] = "assisted"  # the exporter's own name
    assert json.loads(run(place, *asked, "--json").stdout) == value


def test_no_policy_is_on_top_where_nothing_plays_it(place):
    done = run(place, "--decoder", "openvino", "--folds", "2")
    assert done.exit_code == 0 and "policy on top" not in done.stdout and "judge" in done.stdout
    assert "nothing plays policies inside this decoder" in done.stdout


def test_a_host_plays_only_what_it_can_hold(place):
    value = json.loads(run(place, "--decoder", "llamacpp", "--json", "--folds", "2").stdout)
    assert {"mlp", "confidence"} <= set(value["about"]["policies"])
    assert not {"hazard", "ppo"} & set(value["about"]["policies"])


def test_by_default_all_portable_policies_join(place):
    value = json.loads(run(place, "--decoder", "transformers", "--json", "--folds", "2").stdout)
    assert {"hazard", "mlp", "best-fixed", "confidence"} <= set(value["about"]["policies"])
    assert not {"ucb1", "neural-hazard", "oracle", "token-hazard"} & set(value["about"]["policies"])


def test_the_help_lists_the_decoders():
    text = " ".join(CliRunner().invoke(main, ["recommend", "--help"]).stdout.split())
    assert "transformers assisted generation of transformers 5.24" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--decoder'"),
        (["--decoder", "transformer"], "decoder 'transformer' is unknown; did you mean 'transformers'?"),
        (["--decoder", "transformers", "--compression", "int8"], "no sequences at 'int8'; they hold bf16, nf4"),
        (["--decoder", "transformers", "--policy", "oracle"], "is a bound that knows the future"),
        (["--decoder", "openvino", "--policy", "svip"], "nothing plays policies inside OpenVINO GenAI 2026.4; leave"),
        (
            ["--decoder", "vllm", "--policy", "ucb1"],
            "'ucb1' can't be played by vLLM 0.32 with the plugin speckv-vllm: it",
        ),
        (["--decoder", "llamacpp", "--policy", "hazard"], "which llama-cpp-python 0.3.36 can't show"),
        (["--decoder", "transformers", "--batch-size", "2"], "was measured for batches of 1, not of 2"),
        (["--decoder", "transformers", "--folds", "7"], "hold 6 prompts, too few for 7 folds"),
    ],
)
def test_what_cannot_be_recommended_is_one_line(arguments, message, place):
    done = run(place, *arguments)
    (line,) = done.stderr.splitlines()
    assert done.exit_code == 2 and line.startswith("speckv: error: ") and message in line


@pytest.mark.slow
def test_the_page_shows_what_is_printed():
    page = (pathlib.Path(__file__).parents[1] / "docs" / "recommend.md").read_text(encoding="utf-8")
    command, shown = re.search(r"<!-- speckv (.*?) -->\n```\n(.*?)```", page, re.DOTALL).groups()
    done = CliRunner().invoke(main, command.split())
    assert done.exit_code == 0 and [line.rstrip() for line in done.stdout.splitlines()] == shown.splitlines()
