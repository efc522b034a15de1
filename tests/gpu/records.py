"""What a rollout's record must show."""


def checked(record):
    """The record, once no NaN has reached a token."""
    assert record["finite_logprobs"], "NaN reached a token"
    return record


def whole(record, requests=32):
    """Every token and log-probability equals the reference's."""
    found = record["against"]
    return found["same_tokens_and_logprobs"] == found["requests"] == requests


def eager(record):
    """Decode steps without a graph."""
    return sum(row["eager"] for row in record["audit"].values())
