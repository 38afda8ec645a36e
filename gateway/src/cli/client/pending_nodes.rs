//! Warnings of a command about the nodes in `X-Gw-Pending-Nodes`.

/// Warnings for a list such as `2, 5;dead`.
pub(super) fn warnings(nodes: &str) -> Vec<String> {
    let nodes = || {
        nodes
            .split(',')
            .map(str::trim)
            .filter(|node| !node.is_empty())
    };
    let dead: Vec<&str> = nodes()
        .filter_map(|node| node.strip_suffix(";dead"))
        .collect();
    let silent: Vec<&str> = nodes().filter(|node| !node.ends_with(";dead")).collect();
    let silent = (!silent.is_empty()).then(|| {
        let silent = silent.join(", ");
        format!(
            "not yet in use at node {silent}, which does not answer or cannot write to its \
             data_dir; `gw-gateway region status` and its log show it"
        )
    });
    let dead = (!dead.is_empty()).then(|| {
        let dead = dead.join(", ");
        format!(
            "not asked, because it is dead: node {dead}; a process of it that still runs, cut off \
             from PostgreSQL, may serve without the change: make sure that it has ended, then \
             start it again or use `gw-gateway region remove`"
        )
    });
    silent.into_iter().chain(dead).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_that_do_not_answer_and_dead_ones_have_a_warning_each() {
        assert_eq!(warnings("").len(), 0);
        let silent = warnings("2, 5");
        assert!(
            silent.len() == 1 && silent[0].starts_with("not yet in use at node 2, 5, which"),
            "{silent:?}"
        );
        let both = warnings("1;dead, 2, 7;dead");
        assert!(
            both[0].starts_with("not yet in use at node 2, which"),
            "{both:?}"
        );
        assert!(
            both[1].starts_with("not asked, because it is dead: node 1, 7; "),
            "{both:?}"
        );
        assert_eq!(warnings("3;dead").len(), 1);
    }
}
