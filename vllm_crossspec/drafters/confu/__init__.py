"""ConFu (Qin et al., 2026): EAGLE-3's drafter, and a target that contemplates the future for it."""
