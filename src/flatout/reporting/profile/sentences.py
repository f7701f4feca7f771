"""A profile in sentences, as messages of the catalogue: what every report on it shares."""

import re
from collections.abc import Iterator

from flatout.records.messages import Sentence, Text, named, times, words, written
from flatout.records.profile import PHASES, Profile, Regime, most_times
from flatout.records.units import format_bytes, format_ms, format_rate, format_share

WORTH_A_HEADLINE = 0.10
"""A wait below a tenth of the step is not what a reader should look at first."""
MOST = 0.5
"""Of the run: what takes more comes before anything inside a step."""
MOST_CONSUMERS = 3
WORTH_A_WORD = 0.01
"""A share below a percent of the step is no part of the answer."""
COMPUTE = ("forward", "backward", "optimizer")
WAIT = "data_wait"
"""Finding of which the headline has a sentence of its own."""
LESS, MORE = 0.95, 1.02
"""A gain of free data that differs by more from what the wait alone would give (Amdahl's law) is
explained: a reader does the same division."""
CEILINGS = {
    "free_data": "ceiling_data",
    "free_copies": "ceiling_copies",
    "compute_only": "ceiling_compute",
}


def headline(profile: Profile) -> Sentence:
    """Return the one sentence that answers where the time goes."""
    first = next(iter(profile.findings), None)
    if first and first.of == "run" and not first.is_bound and first.share > MOST:
        return words("headline.because", because=written(first.because))
    copies = profile.share("h2d")
    others = (
        finding
        for finding in profile.findings
        if finding.of == "step" and not finding.is_bound and finding.code != WAIT
    )
    top = max(others, key=lambda finding: finding.share, default=None)
    if top and top.share > max(profile.lost_to_data, copies, WORTH_A_HEADLINE):
        return words("headline.because", because=written(top.because))
    if profile.share(WAIT) >= max(copies, WORTH_A_HEADLINE):
        return _waiting(profile)
    if copies >= WORTH_A_HEADLINE:
        gain = times(profile.ceilings.free_copies)
        return words("headline.copies", share=format_share(copies), gain=gain)
    return _computing(profile)


def _waiting(profile: Profile) -> Sentence:
    """Say what the wait for data costs; where free data gives another gain, say that too."""
    share, gain = profile.share(WAIT), profile.ceilings.free_data
    name = "data"
    if profile.ceilings.is_measured and gain < LESS * most_times(share):
        name = "data_less"
    if gain > MORE * most_times(share):
        name = "data_more"
    return words(f"headline.{name}", share=format_share(share), gain=times(gain))


def known_ceilings(profile: Profile) -> list[tuple[str, float]]:
    """Return the ceilings that say something, by name.

    On a CPU nothing is copied to a device. Without a loader no one saw what data cost.
    """
    ceilings = profile.ceilings
    has_data = bool(profile.training_loaders) or profile.phases_ms[WAIT] > 0
    shown = {
        "free_data": has_data,
        "free_copies": profile.device_kind != "cpu",
        "compute_only": True,
    }
    return [(name, getattr(ceilings, name)) for name in CEILINGS if shown[name]]


def warnings(profile: Profile) -> tuple[Sentence, ...]:
    """Return why the numbers must not be trusted, one sentence each."""
    return tuple(words("headline.invalid", why=written(why)) for why in profile.invalid)


def readings(profile: Profile) -> Iterator[tuple[str, Text]]:
    """Yield what was measured: the name of its label, and the words."""
    step = profile.step_ms
    low, median, high = map(format_ms, (step.p10, step.median, step.p90))
    yield "step_time", words("reading.step_time", median=median, p10=low, p90=high, n=str(step.n))
    if profile.epoch_start_ms and profile.epoch_steps:
        start, steps = format_ms(profile.epoch_start_ms), str(profile.epoch_steps)
        yield "epoch_start", words("reading.epoch_start", time=start, steps=steps)
    if profile.samples_per_s:
        rate = format_rate(profile.samples_per_s)
        samples = f"{profile.samples_per_step:.1f}".removesuffix(".0")
        yield "speed", words("reading.speed", rate=rate, samples=samples)
    if profile.regime is not None:
        yield "regime", _regime(profile.regime)
        yield "best_cases", _best_cases(profile.regime)
    yield "device_busy", _busy(profile)
    if profile.mfu is not None:
        yield "mfu", format_share(profile.mfu)
    yield "peak_memory", _memory(profile)
    yield "losses", _losses(profile)
    yield "warm_up", _warm_up(profile)
    yield "overhead", words("reading.overhead", share=format_share(profile.overhead_share))


def _warm_up(profile: Profile) -> Sentence:
    """Say which steps were left out at the beginning."""
    first, total = format_ms(profile.first_step_ms), format_ms(profile.warmup_ms)
    if profile.warmup_steps == 1:
        return words("reading.warm_up_one", time=total)
    return words("reading.warm_up", n=str(profile.warmup_steps), time=total, first=first)


def ceilings_sentence(profile: Profile) -> Sentence:
    """Say what each cause could gain at most."""
    parts = tuple(
        words(f"reading.{CEILINGS[name]}", ratio=times(ratio))
        for name, ratio in known_ceilings(profile)
    )
    text = words("reading.ceilings", parts=parts)
    slowed = profile.ceilings.slowed_share
    if slowed < WORTH_A_WORD:
        return text
    return words("reading.ceilings_slowed", ceilings=text, share=format_share(slowed))


def consumers_sentences(profile: Profile) -> Iterator[Sentence]:
    """Yield where in the user's code the most of the step's own work is done, where it was seen."""
    consumers = profile.trace.consumers if profile.trace else ()
    parts = tuple(
        words(
            "reading.consumer" if one.module else "reading.consumer_line",
            share=format_share(one.share),
            module=one.module,
            line=one.line,
            operators=", ".join(x.name.rpartition("::")[2] for x in one.operators),
        )
        for one in consumers[:MOST_CONSUMERS]
        if one.share >= WORTH_A_WORD
    )
    if parts:
        yield words("reading.consumers", parts=parts)


def left_out(profile: Profile) -> Iterator[Sentence]:
    """Yield one sentence for each thing that a report cannot show, with the reason."""
    absent = {
        "steps": not profile.steps_ms,
        "journey": profile.journey is None,
        "limits": profile.limits is None,
        "memory": profile.memory is None,
        "gpu": profile.gpu is None,
        "syncs": not profile.syncs,
        "ranks": not profile.ranks,
    }
    yield from (words(f"missing.{name}") for name, is_absent in absent.items() if is_absent)
    for part in (profile.journey, profile.limits, profile.gpu):
        for name, why in ((part.missing if part else None) or {}).items():
            yield words("about.missing", name=unseen(name), why=written(why))


def unseen(name: str) -> str:
    """Return the words for a reading that is missing, its name where there are none."""
    said = named("unseen", re.sub(r"\W+", "_", name))
    return said if isinstance(said, Sentence) else name


def _computing(profile: Profile) -> Sentence:
    share, other = profile.share(*COMPUTE), profile.share("other")
    if share < other:
        gain = times(most_times(other))
        return words("headline.outside", share=format_share(other), gain=gain)
    most = max(COMPUTE, key=profile.share)
    about = {
        "share": format_share(share),
        "most": words(f"phase.{most}"),
        "most_share": format_share(profile.share(most)),
    }
    if not profile.training_loaders and not profile.phases_ms[WAIT]:
        return words("headline.computing_alone", **about)
    return words("headline.computing", wait=format_share(profile.share(WAIT)), **about)


def _busy(profile: Profile) -> Sentence:
    share = format_share(profile.device_busy_share)
    if profile.device_kind == "cpu":
        return words("reading.busy_cpu", share=share)
    if profile.gpu_util_share is not None:
        return words("reading.busy_gpu", share=share, gpu_util=format_share(profile.gpu_util_share))
    return words("reading.busy", share=share)


def _memory(profile: Profile) -> Text:
    peak = profile.peak_bytes
    counts = {"allocated": peak.allocated, "reserved": peak.reserved, "held": peak.device}
    parts = tuple(
        words(f"reading.{k}", size=format_bytes(count)) for k, count in counts.items() if count
    )
    return parts or words("reading.memory_unknown")


def _losses(profile: Profile) -> Sentence:
    if not profile.losses:
        return words("reading.no_losses")
    first, last = f"{profile.losses[0]:.4g}", f"{profile.losses[-1]:.4g}"
    return words("reading.losses", first=first, last=last, n=str(len(profile.losses)))


def _regime(regime: Regime) -> Sentence:
    """Return what bounds the step, the largest share first; what is below a percent is left out."""
    shares = sorted(regime.shares.items(), key=lambda item: -item[1])
    shown = tuple(
        words("reading.part", name=words(f"regime.{cause}"), share=format_share(share))
        for cause, share in shares
        if share >= WORTH_A_WORD
    )
    return words("reading.regime", shares=shown or words(f"regime.{regime.name}"))


def _best_cases(regime: Regime) -> Sentence:
    """Return what each phase could give at most, in the order of the step."""
    cases = tuple(
        words("reading.part", name=words(f"phase.{phase}"), share=times(regime.amdahl[phase]))
        for phase in PHASES
        if regime.amdahl.get(phase, 1.0) >= 1 + WORTH_A_WORD
    )
    return words("reading.best_cases", cases=cases)
