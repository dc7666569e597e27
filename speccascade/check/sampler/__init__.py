"""The check of anyone's speculative sampler, and of the samples of a server: it needs nothing of a decode loop."""

from speccascade.check.sampler.judge import check_sampler, SamplerReport
from speccascade.check.sampler.samples import check_samples
