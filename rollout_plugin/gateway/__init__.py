"""The front door of a run's replicas: the API that OpenAI's clients speak, with the version behind every token."""
