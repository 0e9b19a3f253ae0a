"""Tasks: katas, feature deletion, scrub and leak prover, validation, grading, curriculum."""
