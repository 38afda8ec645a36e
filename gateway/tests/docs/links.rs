//! Links between the pages of the repository.

use std::fs;
use std::path::{Path, PathBuf};

use crate::repository;
use crate::sources::markdown::{anchors, links};

/// Folders without pages of the project.
const LEFT_OUT: [&str; 4] = [".git", "node_modules", "target", "shared/vendor/http"];

/// Every Markdown file below `folder`.
pub(crate) fn pages(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !LEFT_OUT.iter().any(|name| path.ends_with(name)) {
            found.extend(pages(&path));
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
    found
}

/// Returns a line for each link of `page`, a file with this text, that leads nowhere.
fn broken(page: &Path, text: &str) -> Vec<String> {
    let broken = links(text).into_iter().filter_map(|(line, target)| {
        let (path, anchor) = target
            .split_once('#')
            .map_or((target.as_str(), None), |(path, it)| (path, Some(it)));
        if path.contains("://") || path.starts_with("mailto:") {
            return None;
        }
        let file = if path.is_empty() {
            page.to_owned()
        } else {
            page.parent()?.join(path)
        };
        let reason = if !file.exists() {
            "no such file"
        } else if path.starts_with('/') {
            "not relative"
        } else if let Some(anchor) = anchor
            && file.extension().is_some_and(|extension| extension == "md")
        {
            let text = if path.is_empty() {
                text.to_owned()
            } else {
                fs::read_to_string(&file).unwrap()
            };
            if anchors(&text).iter().any(|it| it == anchor) {
                return None;
            }
            "no such heading"
        } else {
            return None;
        };
        Some(format!("{}:{line}: {target}: {reason}", page.display()))
    });
    broken.collect()
}

#[test]
fn every_link_leads_to_a_file_and_a_heading_of_it() {
    let pages = pages(&repository());
    assert!(pages.len() > 10, "{pages:?}");
    let broken: Vec<String> = pages
        .iter()
        .flat_map(|page| broken(page, &fs::read_to_string(page).unwrap()))
        .collect();
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn a_link_to_a_missing_file_or_heading_is_found() {
    let page = repository().join("README.md");
    let text = "# A\n\
                [a](#a) [b](#b) [c](gateway/Cargo.toml#L1) [d](none.md) \
                [e](https://e.example/#none)\n";
    let found = broken(&page, text);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(
        found[0].ends_with(":2: #b: no such heading")
            && found[1].ends_with(":2: none.md: no such file"),
        "{found:?}"
    );
}

#[test]
fn the_summary_lists_every_page_of_the_documentation() {
    let folder = repository().join("docs");
    let summary = folder.join("SUMMARY.md");
    let listed = links(&fs::read_to_string(&summary).unwrap());
    let listed: Vec<PathBuf> = listed
        .into_iter()
        .map(|(_, target)| folder.join(target))
        .collect();
    for page in pages(&folder).into_iter().filter(|page| *page != summary) {
        assert!(
            listed.contains(&page),
            "docs/SUMMARY.md does not list {}",
            page.display()
        );
    }
}
