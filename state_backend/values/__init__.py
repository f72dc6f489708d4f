"""Plain values: what the other floors talk about. Nothing here touches a disk, a clock or a client."""
