"""The report of `survey`: the article's table, with what was measured next to it."""

from flatout.records.ablation import Survey, SurveyRow
from flatout.records.messages import ENGLISH, Sentence, Text, interval_of, messages, words, written
from flatout.records.technique import Numerics
from flatout.records.units import format_duration, format_ratio
from flatout.reporting.blocks import UNKNOWN, Block, Next, Table, listed, report
from flatout.reporting.tuning.verdict import STOPPED


def render_survey(survey: Survey, *, width: int = 80, language: str = ENGLISH) -> str:
    """Return the report: the answer, the table, what it does not show, what to type next."""
    device = survey.baseline.device_name
    blocks: tuple[Block, ...] = (
        _headline(survey),
        words("tuning.where", workload=survey.workload, device=device),
        Table(
            columns=(
                *("method", "measured_ratio", "interval", "article_faster"),
                *("memory_ratio", "article_smaller"),
            ),
            rows=tuple(_row(row) for row in survey.rows),
            details=tuple(_detail(row) for row in survey.rows),
        ),
        listed(_notes(survey)),
        Next(command=next_command(survey)),
    )
    return report(blocks, messages(language), width)


def next_command(survey: Survey) -> str:
    """Return what to type next: a tuning of what was faster and changes no training by promise."""
    names = {
        name
        for row in survey.rows
        if row.is_faster == "yes"
        if Numerics.PRECISION.allows(Numerics(row.numerics or "exact"))
        for name in row.recipe.names
    }
    only = f" --only {','.join(sorted(names))}" if names else ""
    return f"flatout tune{only} {survey.workload}"


def _headline(survey: Survey) -> Sentence:
    measured = [row for row in survey.rows if row.comparison]
    both = [row for row in measured if row.is_faster == "yes" or row.is_smaller == "yes"]
    return words(
        "survey.headline",
        n=str(len(measured)),
        all=str(len(survey.rows)),
        faster=str(sum(row.is_faster == "yes" for row in measured)),
        smaller=str(sum(row.is_smaller == "yes" for row in measured)),
        neither=str(len(measured) - len(both)),
    )


def _row(row: SurveyRow) -> tuple[Text, ...]:
    pair = row.comparison
    return (
        words(f"method.{row.method}"),
        format_ratio(pair.ratio) if pair else UNKNOWN,
        interval_of(pair.interval) if pair else UNKNOWN,
        _says(row.faster),
        format_ratio(row.peak_ratio) if row.peak_ratio else UNKNOWN,
        _says(row.smaller),
    )


def _says(answer: str) -> Text:
    return words(f"survey.says_{answer}") if answer else UNKNOWN


def _detail(row: SurveyRow) -> Text:
    """Return what was run, or why nothing was."""
    if row.status == "measured":
        changed = Numerics(row.numerics) is Numerics.TRAINING
        name = "survey.with_another_training" if changed else "survey.with"
        return words(name, recipe=row.recipe.label)
    why = written(str(row.why)) if not isinstance(row.why, Sentence) else row.why
    return words(f"survey.{row.status}", why=why) if why else words("survey.not_measured_yet")


def _notes(survey: Survey) -> tuple[Sentence, ...]:
    is_on_cpu = survey.baseline.device_kind == "cpu"
    memory = words("survey.memory_is" if is_on_cpu else "survey.memory_is_of_tensors")
    took = words("survey.took", time=format_duration(survey.cost_s))
    if survey.stopped in STOPPED:
        why = words(f"stopped.{survey.stopped.replace(' ', '_')}")
        took = words("survey.took_stopped", time=format_duration(survey.cost_s), why=why)
    return words("survey.not_judged"), memory, took
