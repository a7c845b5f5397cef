"""The contracts of plug-ins as functions that anybody can call: does this probe, this operation do what its kind promises?

    from sinklab.testing import check_operation, check_probe

    def test_my_probe():
        check_probe(MyProbe, threshold=0.5)

A check that fails raises :class:`~sinklab.errors.ContractError` with the name of the check, what was expected and what was
found. The built-in plug-ins pass the same checks. Everything runs on the CPU, offline, in seconds.
"""

from sinklab.testing.interventions import check_intervention
from sinklab.testing.operations import check_operation
from sinklab.testing.policies import check_policy
from sinklab.testing.probes import check_probe, tiny_models
from sinklab.testing.tasks import check_task

__all__ = ["check_intervention", "check_operation", "check_policy", "check_probe", "check_task", "tiny_models"]
