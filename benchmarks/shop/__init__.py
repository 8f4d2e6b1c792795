"""The smallest business there is: an account that changes, a sale that is written down, an effect that follows."""
