"""``tensorspill report``: one page that needs nothing else, and says what was not measured."""

import base64
import json
import re
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib")

from tensorspill.cli import main
from tensorspill.profiling.host import host
from tensorspill.profiling.report import missing, report
from tensorspill.profiling.rows import Results, header_line, lines_of, to_csv
from tests.profiling.pictures.rows import MIB, grid, row


class Page(HTMLParser):
    """Collects what a page refers to, and its texts."""

    def __init__(self, text):
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == [], "a tag was not closed"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        if tag not in ("meta", "img", "!doctype"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(self.texts)


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "results.jsonl"
    rows = [*grid(), *grid("write")]
    content = "".join(lines_of(each, [each.gbps_last_done] * 3) for each in rows)
    absent = row(rate=None, engine="gds", gpu="cuda:0", path_taken="not measured: no driver")
    path.write_text(header_line() + content + lines_of(absent))
    return path


def test_a_page_holds_pictures_tables_and_what_is_missing(results, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["report", str(results), "--out", str(page), "--title", "Node <7>"]) == 0
    assert "33 points, 32 measured" in capsys.readouterr().out
    found = Page(page.read_text(encoding="utf-8"))
    # Four panels for each direction, and whether the rate holds.
    assert found.tags.count("img") == 9
    assert all(source.startswith("data:image/svg+xml;base64,") for source in found.sources)
    assert "script" not in found.tags
    assert "link" not in found.tags
    for wanted in (
        "Node <7>",
        "node7",
        "nvme0n1",
        "ext4",
        "gds read, not measured: no driver",
        "fio, to compare with",
        "up to 6.00 GB/s",
        "4MiB x 64",
    ):
        assert wanted in found.text
    for source in found.sources:
        picture = base64.b64decode(source.partition(",")[2]).decode()
        outside = re.findall(r'(?:href|src)="(?!#|data:)[^"]*"', picture)
        assert outside == []


@pytest.mark.thorough
def test_json_alone_is_printed(results, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["report", str(results), "--out", str(page), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["page"] == str(page)
    assert said["bytes"] == page.stat().st_size
    assert said["points"] == said["measured"] + 1
    assert said["notes"] == []


@pytest.mark.thorough
def test_csv_and_several_files_make_one_page(results, tmp_path):
    table, page = tmp_path / "more.csv", tmp_path / "page.html"
    table.write_text(to_csv([row(host="another", rate=1.25)]))
    assert main(["report", str(results), str(table), "--out", str(page)]) == 0
    text = Page(page.read_text()).text
    assert "another" in text
    assert "node7" in text


@pytest.mark.thorough
def test_what_files_hold_can_not_change_the_page(tmp_path):
    evil = "\"><script>alert(1)</script><img src=http://x/>'&"
    rows = [
        row(host=evil, device=evil, fs=evil, engine=evil, path_taken=evil, cmd=evil, commit=evil),
        row(ceiling_name=evil, direction=evil, gpu=evil),
        row(engine=evil, rate=None, path_taken=evil),
    ]
    path, page = tmp_path / "evil.jsonl", tmp_path / "page.html"
    path.write_text("".join(map(lines_of, rows)))
    assert main(["report", str(path), "--out", str(page), "--title", evil]) == 0
    found = Page(page.read_text())
    assert "script" not in found.tags
    assert all(source.startswith("data:") for source in found.sources)
    assert "alert(1)" in found.text


@pytest.mark.thorough
def test_a_file_that_was_cut_short_gives_a_page_that_says_so(results, tmp_path, capsys):
    content = results.read_text()
    results.write_text(content[: content.rindex('"cmd"')])
    page = tmp_path / "page.html"
    assert main(["report", str(results), "--out", str(page)]) == 1
    assert "cut short" in capsys.readouterr().out
    assert "cut short" in Page(page.read_text()).text


def test_rows_of_an_older_form_and_no_rows_at_all_give_a_page(tmp_path):
    old, none = tmp_path / "old.jsonl", tmp_path / "none.jsonl"
    value = {"engine": "aio", "direction": "read", "gbps_last_done": 1.0, "block_bytes": MIB}
    old.write_text(json.dumps(value) + "\n")
    none.write_text(header_line())
    for path, said in ((old, "not said"), (none, "No point of tensorspill")):
        page = tmp_path / f"{path.stem}.html"
        assert main(["report", str(path), "--out", str(page)]) == 0
        assert said in Page(page.read_text()).text


def test_this_machine_is_described_and_others_are_not():
    assert "This is that machine now" in report(Results((row(host=host()),), ((),)))
    assert "This is that machine now" not in report(Results((row(host="another"),), ((),)))


def test_many_points_are_cut_in_the_table_and_said():
    rows = tuple(row(depth=depth) for depth in range(1, 621))
    page = Page(report(Results(rows[:4] * 155, ((),) * 620)))
    assert "And 120 more in the files." in page.text


def test_what_was_not_measured_is_counted():
    rows = (row(verified=False), row(cache_dropped=False, rounds=1), row(engine="fio"))
    said = missing(Results(rows, ((),) * 3, ("x.jsonl, line 3: no JSON",)))
    assert "1 of 2 points were not compared byte for byte" in said
    assert "1 of 2 points were read with parts in the page cache" in said
    assert "1 of 2 points rest on a single round" in said
    assert "No write of tensorspill's engines" in said
    assert "Not read: x.jsonl, line 3: no JSON" in said
    assert not any(line.startswith("fio") for line in said)


@pytest.mark.parametrize(
    ("files", "out", "said"),
    [
        (["absent.jsonl"], "page.html", "Can't read the results"),
        (["text"], "page.html", "No results of tensorspill"),
        (["results.jsonl"], "results.jsonl", "take the place of results"),
        (["results.jsonl"], "no/page.html", "Can't write the page"),
    ],
)
def test_what_can_not_be_done_is_an_error(results, tmp_path, capsys, files, out, said):
    (tmp_path / "text").write_text("hello\n")
    before = results.read_bytes()
    paths = [str(tmp_path / name) for name in files]
    assert main(["report", *paths, "--out", str(tmp_path / out)]) == 3
    assert said in capsys.readouterr().err
    assert results.read_bytes() == before
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("command", ["bench", "sweep"])
def test_what_was_measured_is_drawn(command, tmp_path):
    picture = tmp_path / "x.png"
    words = [command, str(tmp_path), "--size", "4MiB", "--rounds", "2", "--direction", "read"]
    words += ["--block", "256KiB,1MiB", "--depth", "2", "--png", str(picture)]
    words += ["--out", str(tmp_path / "x.jsonl")]
    assert main(words) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
