"""BitFit: at every site a vector is added to the bias. It starts at zero."""

from weftune.adapters.plain import JobPart, PlainKind


class BitFit(PlainKind):
    name = "bitfit"

    def part(self, at):
        u_N = at.trained("u")
        return JobPart(add=lambda x_LK: u_N.expand(len(x_LK), -1))

    def start(self, new):
        for value in new.parameters.values():
            value.zero_()

    def merged(self, at):
        u_N = at.own["u"]
        return at.weight_NK, u_N if at.bias_N is None else at.bias_N + u_N
