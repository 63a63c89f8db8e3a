"""The backend `containers`: containers of podman or docker, by their command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from attrs import field, frozen

from turnwise import Resources
from turnwise.errors import ConfigError
from turnwise_workspaces.config import ContainersConfig
from turnwise_workspaces.container_snapshots import (
    find_left_images,
    is_image,
    remove_images,
)
from turnwise_workspaces.container_workspace import ContainerWorkspace
from turnwise_workspaces.engine_command import (
    ask_engine,
)
from turnwise_workspaces.ownership import LABEL, read_owner, this_process
from turnwise_workspaces.workspace import (
    Capabilities,
    Orphan,
    Workspace,
    WorkspaceSpec,
)

_INIT: Final = "while :; do sleep 3600 & wait $!; done"


@frozen(eq=False)
class ContainersBackend:
    """Starts containers that have a label with their owner."""

    config: ContainersConfig
    resources: Resources = field(repr=False)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            images=True,
            disk_limit=self.config.disk != "none",
            snapshots=True,
            mounts=True,
            programs=True,
            networks=("none", "host"),
        )

    def check(self, spec: WorkspaceSpec) -> None:
        if not spec.image:
            raise ConfigError("image: the backend 'containers' needs one")

    async def start(self, spec: WorkspaceSpec) -> Workspace:
        self.check(spec)
        in_memory = (spec.folder, "/tmp", *spec.folders) if self.config.disk == "tmpfs" else ()
        workspace = ContainerWorkspace(self.config.command, spec, self._run, in_memory)
        try:
            await workspace.begin(spec.image)
            await workspace.make_folders(spec.folders)
            for path, data in spec.files.items():
                await workspace.write(path, data)
        except BaseException:
            workspace.kill()
            raise
        return workspace

    async def find_orphans(self) -> Sequence[Orphan]:
        form = f'{{{{.Names}}}}\t{{{{.Label "{LABEL}"}}}}'
        if any("podman" in os.path.basename(part) for part in self.config.command):  # also after `sudo` or `env`
            form = f'{{{{.Names}}}}\t{{{{index .Labels "{LABEL}"}}}}'
        listed = await ask_engine([*self.config.command, "ps", "-a", "--filter", f"label={LABEL}", "--format", form])
        pairs = [line.partition("\t") for line in listed.splitlines()]
        owners = [(name, label, read_owner(label)) for name, _, label in pairs]
        gone = [Orphan(name=name, owner=label) for name, label, owner in owners if owner is not None and owner.is_gone]
        return [*gone, *await find_left_images(self.config.command)]

    async def reap(self) -> Sequence[Orphan]:
        found = await self.find_orphans()
        for orphan in found:  # the containers first, which may be of the images
            if is_image(orphan.name):
                await remove_images(self.config.command, [orphan.name])
            else:
                await ask_engine([*self.config.command, "rm", "-f", orphan.name])
        return found

    def _run(self, name: str, spec: WorkspaceSpec) -> list[str]:
        limits, size = spec.limits, f"size={spec.limits.disk_mb}m"
        disk = {
            "tmpfs": [
                *("--read-only", "--tmpfs", f"{spec.folder}:rw,exec,mode=1777,{size}"),
                *("--tmpfs", f"/tmp:rw,exec,mode=1777,{size}"),
                *(part for each in spec.folders for part in ("--tmpfs", f"{each}:rw,exec,mode=1777,{size}")),
            ],
            "quota": ["--storage-opt", size],
            "none": [],
        }[self.config.disk]
        return [
            *("run", "-d", "--name", name, "--label", f"{LABEL}={this_process()}", "--hostname", "workspace"),
            *("--network", spec.network, "--memory", f"{limits.memory_mb}m", "--pids-limit", str(limits.processes)),
            *("--security-opt", "no-new-privileges", "--stop-signal", "KILL", "--workdir", spec.folder),
            *disk,
            *(part for path, source in spec.mounts.items() for part in ("--volume", f"{source}:{path}:ro")),
            *(part for name, value in spec.environment.items() for part in ("--env", f"{name}={value}")),
            *self.config.run_options,
            *("--entrypoint", "/bin/sh", spec.image, "-c", _INIT),
        ]
