//! Pages of a list, in the order of ids.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

const LIMIT_DEFAULT: usize = 100;
const LIMIT_MAX: usize = 1000;

/// Which page.
#[derive(Debug, Clone, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct PageQuery {
    /// Most items on the page.
    #[param(minimum = 1, maximum = 1000, default = 100)]
    pub limit: Option<usize>,
    /// `next_cursor` of the page before.
    pub cursor: Option<String>,
}

/// Some of the items, and where the rest begins.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Page<T> {
    /// Items of this page.
    pub items: Vec<T>,
    /// Ask with it for the items that follow; null on the last page.
    pub next_cursor: Option<String>,
}

/// A page size outside the allowed range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be a whole number from 1 to {LIMIT_MAX}")]
pub struct InvalidLimit;

/// The page size for a requested `limit`; the default without one.
pub fn checked_limit(limit: Option<usize>) -> Result<usize, InvalidLimit> {
    let limit = limit.unwrap_or(LIMIT_DEFAULT);
    if (1..=LIMIT_MAX).contains(&limit) {
        Ok(limit)
    } else {
        Err(InvalidLimit)
    }
}

impl<T> Page<T> {
    /// Cuts one page out of all `items`, which are sorted by `id`. The cursor is the id of the last
    /// item of the previous page, so it stays valid when items are created or deleted.
    pub fn of<R>(
        items: impl Iterator<Item = R>,
        id: impl Fn(&R) -> &str,
        query: &PageQuery,
        view: impl Fn(R) -> T,
    ) -> Result<Self, InvalidLimit> {
        let limit = checked_limit(query.limit)?;
        let mut rest = items
            .skip_while(|item| {
                query
                    .cursor
                    .as_deref()
                    .is_some_and(|cursor| id(item) <= cursor)
            })
            .peekable();
        let mut last = None;
        let mut page = Vec::new();
        while page.len() < limit
            && let Some(item) = rest.next()
        {
            last = Some(id(&item).to_owned());
            page.push(view(item));
        }
        Ok(Self {
            items: page,
            next_cursor: last.filter(|_| rest.peek().is_some()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_pages_have_no_gap_and_no_overlap() {
        let all = ["a", "b", "c", "d", "e"];
        for limit in 1..=6 {
            let mut seen = Vec::new();
            let mut query = PageQuery {
                limit: Some(limit),
                cursor: None,
            };
            loop {
                let page = Page::of(all.into_iter(), |item| item, &query, |item| item).unwrap();
                seen.extend(page.items);
                match page.next_cursor {
                    Some(cursor) => query.cursor = Some(cursor),
                    None => break,
                }
            }
            assert_eq!(seen, all, "{limit}");
        }
        let zero = PageQuery {
            limit: Some(0),
            cursor: None,
        };
        let error = Page::of(all.into_iter(), |item| item, &zero, |item| item).unwrap_err();
        assert_eq!(error.to_string(), "must be a whole number from 1 to 1000");
    }
}
