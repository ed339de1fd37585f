"""API reference: `rumor.gossip_pga` is the function, although griffe finds the module of that name."""

from typing import Any

import griffe


class Functions(griffe.Extension):
    """Let names of the package stand for functions, where their modules have the same name."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Correct the names that were imported from a module of that name."""
        for name, member in list(pkg.members.items()):
            own = f"{pkg.path}."
            if member.is_alias and member.target_path.startswith(own):
                found = pkg[member.target_path.removeprefix(own)]
                if found.is_module and name in found.members:
                    path = f"{member.target_path}.{name}"
                    pkg.set_member(name, griffe.Alias(name, path, parent=pkg))
