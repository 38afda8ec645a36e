//! Names of pages of the documentation in messages.

use std::path::Path;

/// Folders of the pages of an installed package, in the order in which they are looked for. Each
/// has all pages.
const INSTALLED: [&str; 2] = ["/usr/share/doc/gw-gateway", "/usr/share/doc/gw-agent"];

/// Replaces each `docs/PAGE.md` of a message, which names a page in the source, by the path of that
/// page if a package has installed it.
pub fn located(message: &str) -> String {
    located_in(&INSTALLED.map(Path::new), message)
}

fn located_in(folders: &[&Path], message: &str) -> String {
    const SOURCE: &str = "docs/";
    let mut parts = message.split(SOURCE);
    let mut located = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(".md").map_or(0, |at| at + ".md".len());
        let page = &part[..end];
        let is_name = |it: &str| !it.is_empty() && !it.contains(['/', ' ']);
        let installed = folders
            .iter()
            .map(|folder| folder.join(page))
            .find(|path| is_name(page) && path.exists());
        match installed {
            Some(path) => located += &path.display().to_string(),
            None => {
                located += SOURCE;
                located += page;
            }
        }
        located += &part[end..];
    }
    located
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn installed_pages_are_named_by_their_paths() {
        let folder = std::env::temp_dir().join(format!("gw-pages-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("region.md"), "").unwrap();
        let none = folder.join("none");
        let located = |message| located_in(&[&none, &folder], message);
        let path = folder.join("region.md").display().to_string();
        for (message, expected) in [
            ("see docs/region.md", format!("see {path}")),
            (
                "docs/region.md, Stores; docs/agent.md, and docs/region.md",
                format!("{path}, Stores; docs/agent.md, and {path}"),
            ),
            ("docs/ has pages", "docs/ has pages".to_owned()),
            (
                "my docs/a folder/region.md",
                "my docs/a folder/region.md".to_owned(),
            ),
            ("docs/../region.md", "docs/../region.md".to_owned()),
            ("nothing", "nothing".to_owned()),
        ] {
            assert_eq!(located(message), expected, "{message}");
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
