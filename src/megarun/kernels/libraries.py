"""The optional packages of a plan on this machine: which run, and which do not, with the reason."""

from collections.abc import Iterator
from typing import NamedTuple

from megakernels.libraries import HOPPER, LIBRARIES, LibraryName, installed_version, loaded
from megaplan.hosts.megarun.libraries import library_texts
from megaplan.inventory.tensors import Inventory
from megaplan.spec.models import Spec


class LibraryNote(NamedTuple):
    """A difference, or the agreement, of a plan and a machine about one package.

    Attributes:
        name: The package.
        text: Text for the log.
        differs: True if the plan names the package but megarun's kernels run instead.
    """

    name: LibraryName
    text: str
    differs: bool


def library_notes(spec: Spec, inventory: Inventory, capability: tuple[int, int]) -> Iterator[LibraryNote]:
    """Notes on each package that the plan names or the machine has.

    A plan's bytes hold without its packages too: own kernels then hold less, and run in another time.

    Args:
        spec: The plan's spec.
        inventory: Tensors of the plan.
        capability: Compute capability of this machine's device.
    """
    texts = library_texts(spec, inventory)
    for name, known in LIBRARIES.items():
        if name not in texts:
            found = installed_version(name)
            if found is not None:
                yield LibraryNote(name, f"{name} {found} is installed, and host.libraries of the plan does not name it", differs=False)
            continue
        reason = loaded(name).reason if capability[0] == HOPPER else f"this GPU is sm_{capability[0]}{capability[1]}, not sm_{HOPPER}0"
        if reason is None:
            yield LibraryNote(name, texts[name], differs=False)
        else:
            text = f"{name} of host.libraries does not run: {reason}; {known.replaces} run instead, within the bytes of the plan"
            yield LibraryNote(name, text, differs=True)
