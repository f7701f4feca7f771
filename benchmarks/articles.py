"""The page of every tip of the articles, in English and Korean, from `examples/articles/tips.toml`.

python -m benchmarks.articles
"""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples/articles"
PAGES = {"en": ROOT / "docs/articles.md", "ko": ROOT / "docs/articles.ko.md"}
WORDS = {
    "en": {
        "title": "Every tip of the articles",
        "intro": (
            "flatout grew from five Korean articles on training efficiency. Below is each of their "
            "tips, snippets and questions: what is wrong or dated in it, the command that applies "
            "or checks it on your script, and a corrected script with what it prints. The scripts "
            "are in [`examples/articles/`](../examples/articles/) and run on a CPU in seconds; a "
            "test runs each and compares its result. This page is made by "
            "`python -m benchmarks.articles`. [한국어](articles.ko.md)"
        ),
        "columns": "| tip | what is wrong or dated | command | script and its result |",
    },
    "ko": {
        "title": "글에 나온 모든 팁",
        "intro": (
            "flatout은 학습 효율에 관한 한국어 글 다섯 편에서 시작했습니다. 아래는 그 글들의 모든 "
            "팁, 코드, 질문입니다: 틀렸거나 낡은 점, 자기 스크립트에 적용하거나 확인하는 명령, "
            "고친 스크립트와 그 출력. 스크립트는 [`examples/articles/`](../examples/articles/)에 "
            "있고 CPU에서 몇 초 안에 실행되며, 테스트가 모두 실행해 결과를 비교합니다. 이 페이지는 "
            "`python -m benchmarks.articles`로 만듭니다. [English](articles.md)"
        ),
        "columns": "| 팁 | 틀렸거나 낡은 점 | 명령 | 스크립트와 결과 |",
    },
}


def read():
    """Return the articles and the tips."""
    return tomllib.loads((FOLDER / "tips.toml").read_text(encoding="utf-8"))


def page(language):
    """Return the page in a language."""
    known, say = read(), WORDS[language]
    lines = [f"# {say['title']}", "", say["intro"], ""]
    for article in known["article"]:
        lines += [f"## {article[language]}", "", say["columns"], "|---|---|---|---|"]
        for tip in known["tip"]:
            if tip["article"] == article["number"]:
                lines.append(_row(tip, language))
        lines.append("")
    return "\n".join(lines)


def _row(tip, language):
    script = tip.get("script")
    link = f"[{script}](../examples/articles/{script}): {tip['result']}" if script else ""
    cells = (tip[language], tip.get(f"wrong_{language}", ""), f"`{tip['command']}`", link)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for language, path in PAGES.items():
        path.write_text(page(language), encoding="utf-8")
