"""BitFit: at every site a vector is added to the bias. It starts at zero."""

from weftune.adapters.plain import JobPart, PlainKind


class BitFit(PlainKind):
    name = "bitfit"

    def part(self, job_site):
        u_N = job_site.trained("u")
        return JobPart(add=lambda x_LK: u_N.expand(len(x_LK), -1))

    def start(self, new_adapter):
        for value in new_adapter.parameters.values():
            value.zero_()

    def merged(self, merge_site):
        u_N, bias_N = merge_site.own["u"], merge_site.bias_N
        return merge_site.weight_NK, u_N if bias_N is None else bias_N + u_N
