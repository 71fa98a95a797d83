"""A server with the interface of OpenAI's, over language models, encoders and other models."""
