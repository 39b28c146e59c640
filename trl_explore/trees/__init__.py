"""TreeGRPO's maths: state, rules, steps and search, credit, records, replay."""
