"""Answers the experiments that a policy asks for with trials that are made up."""

from flatout.tuning.experiments import Budget, Record, TrialHistory


class Answered:
    """Drives what asks for experiments; `answer` returns the trial of each."""

    def __init__(self, answer, machine, elapsed_s=0.0):
        self.history = TrialHistory(
            machine=machine,
            budget=Budget(total_s=100.0, elapsed_s=elapsed_s),
        )
        self.answer = answer

    def drive(self, asking):
        """Return what follows from the answers."""
        try:
            experiment = next(asking)
            while True:
                trial = self.answer(experiment)
                elapsed_s = self.history.budget.elapsed_s
                record = Record(key=experiment.key, elapsed_s=elapsed_s, trial=trial)
                experiment = asking.send(record)
        except StopIteration as end:
            return end.value
