//! One page out of the pages of several nodes.

use std::cmp::Reverse;

use gw_base::page::Page;
use gw_telemetry::request_log::RequestView;

/// Merges pages of the same search at several nodes, the newest request first. No page is longer
/// than `limit`.
///
/// A node has told all that it has down to its cursor, so the merged page ends at the newest of the
/// cursors.
pub(super) fn merge(pages: Vec<Page<RequestView>>, limit: usize) -> Page<RequestView> {
    let end = pages
        .iter()
        .filter_map(|page| page.next_cursor.clone())
        .max();
    let mut items: Vec<RequestView> = pages.into_iter().flat_map(|page| page.items).collect();
    if let Some(end) = &end {
        items.retain(|request| request.id >= *end);
    }
    items.sort_unstable_by(|one, other| Reverse(&one.id).cmp(&Reverse(&other.id)));
    // A node that has another slot now still has requests that the archive has, too.
    items.dedup_by(|one, other| one.id == other.id);
    let is_cut = items.len() > limit;
    items.truncate(limit);
    let last = items.last().filter(|_| is_cut).map(|last| last.id.clone());
    Page {
        items,
        next_cursor: last.or(end),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request(id: u32) -> RequestView {
        RequestView {
            id: format!("{id:08}"),
            ..RequestView::default()
        }
    }

    #[test]
    fn a_request_of_two_logs_appears_once() {
        let both = || page(&[9, 4], None, 10, 10);
        let merged = merge(vec![both(), both()], 10);
        assert_eq!(merged.items.len(), 2);
        assert_eq!(merged.next_cursor, None);
    }

    /// A page of a node that has these requests, the newest first. The node gives up after `work`
    /// requests.
    fn page(all: &[u32], before: Option<&str>, limit: usize, work: usize) -> Page<RequestView> {
        let mut items: Vec<RequestView> = all.iter().map(|id| request(*id)).collect();
        items.retain(|request| before.is_none_or(|before| request.id.as_str() < before));
        let is_cut = items.len() > limit.min(work);
        items.truncate(limit.min(work));
        let next_cursor = items.last().filter(|_| is_cut).map(|last| last.id.clone());
        Page { items, next_cursor }
    }

    proptest! {
        #[test]
        fn pages_have_all_requests_once_and_in_order(
            owners in prop::collection::vec((0usize..3, 0u32..1000), 0..60),
            limit in 1usize..20,
            work in 1usize..20,
        ) {
            let mut all: Vec<u32> = owners.iter().map(|(_, id)| *id).collect();
            all.sort_unstable_by_key(|id| Reverse(*id));
            all.dedup();
            let of = |node: usize| -> Vec<u32> {
                all.iter().copied().filter(|id| *id as usize % 3 == node).collect()
            };
            let nodes = [of(0), of(1), of(2)];
            let mut seen = Vec::new();
            let mut cursor = None::<String>;
            for _ in 0..=all.len() {
                let pages = nodes
                    .iter()
                    .map(|all| page(all, cursor.as_deref(), limit, work))
                    .collect();
                let merged = merge(pages, limit);
                prop_assert!(merged.items.len() <= limit);
                seen.extend(merged.items.into_iter().map(|request| request.id));
                cursor = merged.next_cursor;
                if cursor.is_none() {
                    break;
                }
            }
            prop_assert_eq!(cursor, None);
            prop_assert_eq!(seen, all.iter().map(|id| format!("{id:08}")).collect::<Vec<_>>());
        }
    }
}
