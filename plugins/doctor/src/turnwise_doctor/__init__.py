"""Registers the command `doctor`, and diagnostics of turnwise, the machine and Ray."""

from __future__ import annotations

from turnwise import Command, Diagnostic, NoConfig, Registry, Resources, hookimpl


def make_doctor(_config: NoConfig, _resources: Resources) -> Command:
    """Return the command; its modules are imported when the command line is parsed."""
    from turnwise_doctor.command import DoctorCommand

    return DoctorCommand()


def make_turnwise(_config: NoConfig, _resources: Resources) -> Diagnostic:
    """Return the diagnostic of turnwise, its plugins and its optional packages."""
    from turnwise_doctor.core_diagnostics import TurnwiseDiagnostic

    return TurnwiseDiagnostic()


def make_machine(_config: NoConfig, _resources: Resources) -> Diagnostic:
    """Return the diagnostic of GPUs, CPU cores and memory."""
    from turnwise_doctor.machine_diagnostic import MachineDiagnostic

    return MachineDiagnostic()


def make_ray(_config: NoConfig, _resources: Resources) -> Diagnostic:
    """Return the diagnostic of Ray and its token."""
    from turnwise_doctor.core_diagnostics import RayDiagnostic

    return RayDiagnostic()


@hookimpl
def register_commands(registry: Registry[Command]) -> None:
    """Add `doctor`."""
    registry.add("doctor", make_doctor)


@hookimpl
def register_diagnostics(registry: Registry[Diagnostic]) -> None:
    """Add the diagnoses of turnwise, the machine and Ray."""
    registry.add("turnwise", make_turnwise)
    registry.add("machine", make_machine)
    registry.add("ray", make_ray)
