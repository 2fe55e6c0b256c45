"""Reading patches and their headers."""

import pytest
from elastic_tools.patchset import patchfile

DIFF = """\
diff --git a/vllm/a.py b/vllm/a.py
index 1111..2222 100644
--- a/vllm/a.py
+++ b/vllm/a.py
@@ -3,3 +3,4 @@ def f():
 one
-two
+zwei
+zwei und halb
 three
"""
GOOD = "What: x.\n\nWhy: y.\n\nUpstream-Status: not sent\n"


def text(message: str = GOOD, diff: str = DIFF, subject: str = "[PATCH 02/17] kv: grow") -> bytes:
    return f"From 0 Mon\nFrom: A <a@b>\nDate: now\nSubject: {subject}\n\n{message}\n{diff}".encode()


def test_reads_subject_paths_and_hunks():
    patch = patchfile.parse("n", text())
    assert patch.subject == "kv: grow"
    assert patch.paths == ["vllm/a.py"]
    assert patch.changes[0].hunks == [3]
    assert patch.header_problems() == []


def test_reads_a_folded_encoded_subject():
    subject = "[PATCH] =?UTF-8?q?pool:=20F=C3=BC?=\n =?UTF-8?q?ge=20ein?="
    assert patchfile.parse("n", text(subject=subject)).subject == "pool: Füge ein"


@pytest.mark.parametrize(
    "status", ["not sent", "sent https://github.com/vllm-project/vllm/pull/1", "inappropriate (only for us)"]
)
def test_accepts_each_upstream_status(status):
    message = GOOD.replace("not sent", status)
    assert patchfile.parse("n", text(message)).header_problems() == []


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (GOOD.replace("What: x.\n\n", ""), 'no "What:"'),
        (GOOD.replace("x.", ""), 'no "What:"'),
        (GOOD.replace("What: x.\n\n", "What: x.\n"), 'no "Why:"'),
        (GOOD.replace("Upstream-Status: not sent\n", ""), 'no "Upstream-Status:" line'),
        (GOOD + "Upstream-Status: not sent\n", '2 "Upstream-Status:" lines'),
        (GOOD.replace("not sent", "maybe"), 'Upstream-Status "maybe"'),
        (GOOD.replace("not sent", "inappropriate"), 'Upstream-Status "inappropriate"'),
        (GOOD.replace("not sent", "sent yesterday"), 'Upstream-Status "sent yesterday"'),
    ],
)
def test_names_what_the_header_lacks(message, problem):
    assert any(problem in found for found in patchfile.parse("n", text(message)).header_problems())


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "does not begin"),
        (text(diff=""), "has no diff"),
        (text(diff="---\n"), "changes no file"),
        (text(diff=DIFF.replace("-3,3 +3,4", "-3,3 +3,5")), "shorter"),
        (text(diff=DIFF.replace("-3,3 +3,4", "-3,3 +3,3")), "longer"),
        (text(diff=DIFF.replace("-3,3 +3,4", "-3,2 +3,3")), "longer"),
        (text(diff=DIFF.replace("@@ -3,3", "@@ three")), "broken hunk"),
        (text(diff=DIFF.replace("a/vllm/a.py b/vllm/a.py", '"a/\\303" "b/\\303"')), "odd characters"),
    ],
)
def test_refuses_what_is_no_patch(data, problem):
    with pytest.raises(patchfile.Malformed, match=problem):
        patchfile.parse("n", data)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("new file mode 100644", "add"),
        ("deleted file mode 100644", "delete"),
        ("rename from vllm/b.py", "rename"),
        ("old mode 100644", "mode"),
        ("GIT binary patch", "binary"),
    ],
)
def test_tells_kinds_of_change(line, kind):
    head, index, rest = DIFF.partition("index ")
    assert patchfile.parse("n", text(diff=f"{head}{line}\n{index}{rest}")).changes[0].kind == kind


def test_a_deleted_line_that_looks_like_a_header_stays_in_its_hunk():
    diff = DIFF.replace("-two", "--- two").replace("+zwei\n", "+++ zwei\n")
    assert len(patchfile.parse("n", text(diff=diff)).changes) == 1
