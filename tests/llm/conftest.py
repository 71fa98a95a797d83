"""Models that the tests of language models share."""

import pytest


@pytest.fixture(scope="session")
def lm():
    """A tiny model with two slots, compiled."""
    pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
    import llm_models

    from bitwright.llm.language_model import LanguageModel

    return LanguageModel(llm_models.model(), threads=1)


@pytest.fixture(scope="session")
def lm_wide():
    """The same model with other slots, context and threads."""
    pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
    import llm_models

    from bitwright.llm.language_model import LanguageModel

    return LanguageModel(llm_models.model(slots=5, context=160), threads=2)
