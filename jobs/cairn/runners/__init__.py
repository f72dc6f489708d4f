"""Run the user's processor on a shard: handles, runners, and the conversion of its input and output rows."""
