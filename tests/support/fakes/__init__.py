"""Stand-ins for servers, which tests can make misbehave on cue."""
