"""What the floors above need from outside, as protocols; ``adapters`` implements them."""
