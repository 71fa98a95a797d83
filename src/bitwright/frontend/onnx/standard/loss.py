"""Cross entropy losses; classes are axis 1."""

from __future__ import annotations

from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results, imports


@imports("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
def cross_entropy(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    scores, labels, weights = inputs[0], inputs[1], inputs[2]
    from_log_probs = node.op_type == "NegativeLogLikelihoodLoss"
    loss = ctx.b.cross_entropy(
        scores,
        labels,
        weights,
        ignore_index=node.integer("ignore_index"),
        reduction=node.text("reduction", "mean"),
        from_log_probs=from_log_probs,
    )
    return [loss, ctx.b.log_softmax(scores, axis=1) if node.has_output(1) else None]
