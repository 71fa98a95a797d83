"""Sections of a report that other commands make: a ledger and a search, for layers of the demo."""

LEDGER = {
    "outputs": {"logits": {"sqnr_db": 42.5}, "features": {"sqnr_db": 39.1}},
    "signal_energy": 52011.0,
    "error_energy": 2.93,
    "sqnr_db": 42.5,
    "lines": [
        {
            "layer": "widen",
            "value": "conv2d_3",
            "op": "conv",
            "scheme": "static",
            "cause": "input range",
            "share": 0.41,
            "leave_one_out": 0.39,
            "predicted_sqnr_db": 44.8,
            "predicted_metric": 0.9967,
            "fix": {
                "action": "float",
                "text": "Keep it in float.",
                "bytes": 13824,
                "seconds": 2.1e-5,
                "metric": 0.0017,
            },
        },
        {
            "layer": "block1.conv2",
            "value": "conv2d_2",
            "op": "conv",
            "scheme": "static",
            "cause": "weights",
            "share": 0.33,
            "leave_one_out": 0.3,
            "predicted_sqnr_db": 44.1,
            "predicted_metric": None,
            "fix": {
                "action": "dynamic",
                "text": "Use ranges computed at run time.",
                "bytes": 0,
                "seconds": 8e-6,
                "metric": None,
            },
        },
        {
            "layer": "stem",
            "value": "conv2d",
            "op": "conv",
            "scheme": "static",
            "cause": "input range",
            "share": 0.2,
            "leave_one_out": 0.2,
            "predicted_sqnr_db": 43.4,
            "predicted_metric": None,
            "fix": None,
        },
    ],
    "rest": 0.06,
    "flips": [
        {
            "batch": 2,
            "row": 17,
            "output": "logits",
            "float": 8,
            "quantized": 3,
            "float_margin": 0.021,
            "quantized_margin": 0.008,
        }
    ],
    "flip_count": 1,
    "rows": 600,
    "metric": {"name": "accuracy", "float": 0.9967, "quantized": 0.995},
    "notes": ["shares of layers that are not independent do not add up exactly"],
}
TUNE = {
    "objective": "latency",
    "budget_s": 60,
    "max_drop": 0.01,
    "metric": {"name": "accuracy", "float": 0.9967, "best": 0.995},
    "pareto": [
        {
            "name": name,
            "latency_ms": milliseconds,
            "bytes": size,
            "memory_bytes": 4 * size,
            "score": score,
            "predicted_error": error,
            "measured_error": 1.1 * error,
            "is_best": name == "int8",
        }
        for name, milliseconds, size, score, error in (
            ("float", 1.48, 119000, 0.9967, 0.0),
            ("bf16", 1.1, 62000, 0.9967, 1e-6),
            ("w8", 1.4, 41000, 0.996, 2e-5),
            ("int8, head in float", 0.32, 46000, 0.9958, 4e-5),
            ("int8", 0.19, 37900, 0.995, 6e-5),
            ("w4", 1.35, 24000, 0.981, 9e-3),
        )
    ],
    "layers": [
        {
            "layer": "stem",
            "value": "conv2d",
            "precision": "int8",
            "reason": "the fastest within the budget",
            "options": {
                "int8": {"seconds": 4.7e-5, "error": 1e-5},
                "float": {"seconds": 9e-5, "error": 0.0},
            },
        }
    ],
    "recipe": {"base": "int8", "ignore": ["head"]},
    "seconds": 41.2,
    "stopped": "the budget is used up",
}
