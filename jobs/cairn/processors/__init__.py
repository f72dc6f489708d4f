"""How the code of a user runs on a shard: handles, runners, and the rows that they yield."""
