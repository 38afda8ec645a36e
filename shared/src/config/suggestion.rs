//! Suggestions for misspelt names.

/// The name among `known` that `name` is probably a misspelling of.
pub fn suggestion<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // A third of the characters may be wrong: more would suggest names of another meaning.
    let limit = (name.chars().count() / 3).min(3);
    let distances = known
        .into_iter()
        .map(|known| (strsim::osa_distance(name, known), known));
    distances
        .filter(|(distance, _)| (1..=limit).contains(distance))
        .min()
        .map(|(_, known)| known)
}

/// `; did you mean X?`, or nothing without a suggestion.
pub fn did_you_mean<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    suggestion(name, known)
        .map(|known| format!("; did you mean `{known}`?"))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_similar_names_are_suggested() {
        let known = [
            "backend",
            "backends",
            "proxy",
            "state_dir",
            "traces.endpoint",
        ];
        for (name, expected) in [
            ("bakend", Some("backend")),
            ("backnds", Some("backends")),
            ("porxy", Some("proxy")),
            ("statedir", Some("state_dir")),
            ("traces.endpiont", Some("traces.endpoint")),
            ("colour", None),
            ("x", None),
            ("log", None),
        ] {
            assert_eq!(suggestion(name, known), expected, "{name}");
        }
        assert_eq!(did_you_mean("bakend", known), "; did you mean `backend`?");
        assert_eq!(did_you_mean("colour", known), "");
    }
}
