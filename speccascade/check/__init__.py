"""`speccascade.check` and its command: a package, so that its import leaves the function in its place."""

from speccascade.check.enumeration import check
from speccascade.check.sampler import check_sampler, check_samples
