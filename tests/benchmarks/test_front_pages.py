import subprocess

from benchmarks.front_pages import counts, pictures


def test_a_row_counts_what_the_last_commit_has(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# It\n![b](https://img.shields.io/b.svg)\n![a](a.png)\n")
    (tmp_path / "docs/one.md").write_text("With Lightning and a ray of light.\n")
    (tmp_path / "docs/two.md").write_text("x\n")
    me = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    for words in (("init", "-q"), ("add", "."), (*me, "commit", "-qm", "one")):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)

    _, _, *row = counts(tmp_path)

    assert row == ["4", "3", "1", "2", "4", "Lightning"]


def test_a_badge_is_no_picture():
    assert pictures('<img src="https://img.shields.io/x.svg">\n<img src="a.png">') == [
        '<img src="a.png"'
    ]
