"""What every benchmark stands on: servers, databases, processes, verification, figures."""
