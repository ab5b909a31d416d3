"""The command line: its outputs, its errors, its imports, and its output in a terminal."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import pgmesh
from pgmesh import Layout, plan
from pgmesh.__main__ import COMMANDS, main
from tests.support import golden_files as golden
from tests.support.terminal import COLOUR, run_in_terminal

ROOT = Path(__file__).parents[2]
MESH = "pp=2 dp=4 cp=2 tp=4 --nodes 8x8"


def output(capsys: pytest.CaptureFixture[str], line: str, status: int = 0) -> str:
    """The standard output of a command line; the standard error if the status is 2."""
    assert main(shlex.split(line)) == status
    out, err = capsys.readouterr()
    assert (err, out)[status == 2] == "" or status == 1
    return err if status == 2 else out


ANSWERS = {
    "plan": f"plan {MESH} --view 'moe: ep=8 edp=-1' --combinations dp,cp",
    "plan-in-another-order": f"plan {MESH} --order tp,cp,dp,pp",
    "plan-domains": "plan pp=4 dp=-1 tp=8 --domains 4x18x4",
    "plan-numbered": "plan 2 2 2 --nodes 2x4 --combinations 0,2",
    "show-numbered": "show --rank 5 2 2 2",
    "show": f"show --rank 13 {MESH}",
    "show-without-hosts": "show --rank 5 pp=2 dp=2 tp=2",
    "show-a-million": "show --rank 77777 pp=16 dp=512 cp=8 tp=16 --nodes 131072x8",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_command_output_equals_golden_file(capsys, name):
    text = output(capsys, ANSWERS[name])
    assert max(map(len, text.splitlines())) <= 80
    golden.check(f"command-{name}.txt", f"$ pgmesh {ANSWERS[name]}\n{text}")


def test_command_json_equals_the_data_in_python(capsys):
    answer = json.loads(output(capsys, f"plan {MESH} --json --view 'moe: edp=8 ep=8'"))
    layout = Layout(pp=2, dp=4, cp=2, tp=4)
    assert answer == json.loads(plan(layout, nodes="8x8", views={"moe": {"edp": 8, "ep": 8}}).json())
    golden.check("command-show.json", output(capsys, f"show --rank 13 {MESH} --json"))


def test_command_writes_svg_to_a_file(capsys, tmp_path):
    drawing = tmp_path / "plan.svg"
    text = output(capsys, f"plan {MESH} --svg {drawing}")
    assert text.endswith(f"\n\nSVG written to {drawing}\n")
    assert drawing.read_text().count('<rect class="cell"') == 64
    assert output(capsys, f"plan {MESH} --svg -") == drawing.read_text()
    marked = output(capsys, f"show --rank 13 {MESH} --svg - --colour dp,cp")
    assert marked.count('stroke="#0f172a"') == 1
    assert "one colour: one dp x cp group" in marked


def test_command_output_equals_the_docs(capsys):
    text = (ROOT / "docs" / "see.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n\$ pgmesh (.*?)\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 2  # the other commands have golden files
    for line, answer in blocks:
        assert output(capsys, line) == answer


def test_command_svg_equals_the_docs(capsys):
    drawn = output(capsys, f"plan {MESH} --view 'moe: pp=2 edp=-1 ep=8' --svg -")
    golden.check("../../docs/pictures/two-meshes.svg", drawn)


def test_command_svg_equals_the_readme(capsys, tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    line, shown = re.findall(r"```\npgmesh (plan .*? --svg \S+)\n```\n\n!\[.*?\]\((.*?)\)", text)[0]
    name = line.rpartition(" ")[2]
    assert Path(shown).name == name  # not the picture of the page
    output(capsys, line.replace(name, str(tmp_path / "made.svg")))
    assert (tmp_path / "made.svg").read_text() == (ROOT / shown).read_text()


INVALID = re.findall(r"^\$ pgmesh (.*)$", golden.read("command-errors.txt"), re.MULTILINE)
"""To add a line, add it to the file and run this with ``GOLDEN=write``."""


def test_invalid_command_lines_equal_golden_file(capsys):
    texts = [f"$ pgmesh {line}\n{output(capsys, line, status=2)}" for line in INVALID]
    golden.check("command-errors.txt", "\n".join(texts))


@pytest.mark.parametrize("line", INVALID)
def test_suggested_sizes_are_valid(capsys, line):
    text = output(capsys, line, status=2)
    found = re.search(r": (\S.*) (?:holds|has|cannot).* Did you mean ([^']+)\?$", text)
    if found is not None and found[1] in line:
        assert main(shlex.split(line.replace(found[1], found[2]))) == 0


@pytest.mark.parametrize(
    "line",
    [
        "",
        "plans",
        "plan",
        "plan dp=8 --nodes 1x8 tp=2",
        "plan dp=8 --knots 8x8",
        "plan dp=8 --nodes 1x8 --domains 1x2x4",
        "show dp=8",
        "doctor --timeout -1",
        "doctor --timeout inf",
        "check dp=8 --timeout 0",
    ],
)
def test_unknown_commands_and_options_are_usage_errors(capsys, line):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(shlex.split(line))
    err = capsys.readouterr().err
    assert "usage: pgmesh" in err
    assert ("required: COMMAND" in err) == (line == "")


def test_version_option_prints_the_version(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"pgmesh {pgmesh.__version__}\n"


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_help_fits_80_columns_and_its_examples_run(capsys, words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    with pytest.raises(SystemExit, match=r"^0$"):
        main([*words, "--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for line in re.findall(r"^  pgmesh (.*?)(?: --svg \S+)?$", text, flags=re.MULTILINE):
        assert main(shlex.split(line)) == 0


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environ, capture_output=True, encoding="utf-8", timeout=60, check=True
    )


def test_neither_torch_nor_rich_is_loaded_when_piped():
    lines = [ANSWERS["plan"], ANSWERS["show"], f"plan {MESH} --json", f"plan {MESH} --svg -"]
    each = "; ".join(f"main({shlex.split(line)!r})" for line in lines)
    ran = run("-c", f"import sys; from pgmesh.__main__ import main; {each}; print(*sys.modules, file=sys.stderr)")
    loaded = {*ran.stderr.split()}
    assert "pgmesh.planning.plan" in loaded
    assert not loaded & {"torch", "rich", "numpy", "cachetools"}


def test_closed_pipe_is_no_error():
    words = [sys.executable, "-m", "pgmesh", "plan", "pp=16", "dp=512", "cp=8", "tp=16", "--svg", "-"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(60) == 0


def test_ascii_terminal_gets_an_answer():
    ran = run("-m", "pgmesh", *shlex.split(ANSWERS["show"]), PYTHONIOENCODING="ascii")
    assert "rank 13 of 64: pp0-dp1-cp1-tp1" in ran.stdout


@pytest.mark.parametrize(("name", "ranks"), [("plan", 0), ("show", 64)])
def test_terminal_shows_the_same_with_rich(capsys, name, ranks):
    """And the cells of ranks in a colour for each group, here of four ranks along tp."""
    pytest.importorskip("rich")
    bare, coloured = (run_in_terminal(ANSWERS[name], rich=rich) for rich in (False, True))
    assert bare == output(capsys, ANSWERS[name])
    assert "\x1b" not in bare
    assert "\x1b[" in coloured
    lines = [line.rstrip() for line in COLOUR.sub("", coloured).splitlines()]
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if not line.startswith("one colour")] == bare.splitlines()
    colours = {int(rank): colour for colour, rank in re.findall(r"48;2;([\d;]+)m *\[?(\d+)\]?\x1b", coloured)}
    assert sorted(colours) == [*range(ranks)]
    assert all((colours[rank] == colours[rank + 1]) == (rank % 4 < 3) for rank in range(ranks - 1))
