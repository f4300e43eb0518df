"""Lower bounds on peak memory over all cuts, as a search needs them."""

from collections.abc import Sequence

from megaplan.exploration.values import LayoutChoice, MemoryPolicy, SpecOf
from megaplan.spec.models import Spec


class AnyFloors:
    """Bounds for one model of a host whose bytes are not known without cuts; they are all zero."""

    def peak_bytes(self, spec: Spec) -> int:  # noqa: ARG002
        """Lower bound on peak memory over all cuts."""
        return 0

    def peak_on(self, layout: LayoutChoice, policy: MemoryPolicy, spec_of: SpecOf) -> int:  # noqa: ARG002
        """Lower bound for a layout with a policy; its spec is built only on demand."""
        return 0

    def shared_bytes(self, spec: Spec) -> int:  # noqa: ARG002
        """A smaller and cheaper bound."""
        return 0

    def least_on(self, mesh: LayoutChoice, policies: Sequence[MemoryPolicy], spec_of: SpecOf) -> int:  # noqa: ARG002
        """A smaller and cheaper bound, over several policies and any schedule."""
        return 0

    def stored_bytes(self, spec: Spec) -> int:  # noqa: ARG002
        """Lower bound on the bytes that the ranks of any layout store together; `spec` has one rank."""
        return 0

    def kept_bytes(self, spec: Spec) -> int:  # noqa: ARG002
        """Bytes by which policies are ordered, least memory first."""
        return 0
