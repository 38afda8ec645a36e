//! What an error code means and what to do about it: its section of `docs/errors.md`, as plain
//! text.

const PAGE: &str = include_str!("../../../../../../docs/errors.md");

/// A part of the text about a code.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum GuidePart {
    Paragraph(String),
    /// Items of a list.
    Items(Vec<String>),
}

/// The text about a code, without the status, which the request has; `None` if there is no such
/// code.
pub(crate) fn about(code: &str) -> Option<Vec<GuidePart>> {
    let heading = format!("\n## {code}\n");
    let (_, section) = PAGE.split_once(&heading)?;
    let end = ["\n## ", "\n# "]
        .iter()
        .filter_map(|heading| section.find(heading))
        .min();
    let section = &section[..end.unwrap_or(section.len())];
    let mut parts = Vec::new();
    for (number, block) in section.trim().split("\n\n").enumerate() {
        let block = match block.split_once(". ") {
            Some((status, rest)) if number == 0 && status.starts_with("Status ") => rest,
            None if number == 0 => continue,
            _ => block,
        };
        parts.push(part(block));
    }
    Some(parts)
}

fn part(block: &str) -> GuidePart {
    if block.starts_with("- ") {
        let items = block.strip_prefix("- ").unwrap_or(block).split("\n- ");
        return GuidePart::Items(items.map(plain).collect());
    }
    if block.starts_with('|') {
        // Below the names of the columns and a line.
        let rows = block.lines().skip(2);
        let cells = |row: &str| plain(&row.trim_matches(['|', ' ']).replacen(" | ", ": ", 1));
        return GuidePart::Items(rows.map(cells).collect());
    }
    GuidePart::Paragraph(plain(block))
}

/// Text without marks of Markdown, and without line breaks.
fn plain(text: &str) -> String {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut out = String::new();
    let mut rest = text.as_str();
    while let Some((before, link)) = rest.split_once('[') {
        let Some((shown, after)) = link.split_once("](") else {
            break;
        };
        out.push_str(before);
        out.push_str(shown);
        rest = after.split_once(')').map_or("", |(_, rest)| rest);
    }
    out.push_str(rest);
    out.replace(['`'], "").replace("**", "")
}

#[cfg(test)]
mod tests {
    use gw_shared::error_code::ErrorCode;

    use super::*;

    #[test]
    fn each_code_has_a_text_without_marks() {
        for code in ErrorCode::ALL {
            let code = code.as_str();
            let parts = about(code).unwrap();
            let texts: Vec<&str> = parts
                .iter()
                .flat_map(|part| match part {
                    GuidePart::Paragraph(text) => std::slice::from_ref(text),
                    GuidePart::Items(items) => items.as_slice(),
                })
                .map(String::as_str)
                .collect();
            assert!(!texts.is_empty(), "{code}");
            for text in texts {
                let is_plain = ["](", "`", "**", "\n", "|", "Status "]
                    .iter()
                    .all(|mark| !text.contains(mark));
                assert!(is_plain && text.len() > 20, "{code}: {text}");
            }
        }
        assert_eq!(about("GW_NONE"), None);
    }

    #[test]
    fn status_links_lists_and_tables_are_read() {
        let [GuidePart::Items(limits)] = &about("GW_RATE_LIMIT_EXCEEDED").unwrap()[..] else {
            panic!()
        };
        assert!(limits[0].starts_with("On a service: the bucket of the service is empty."));
        assert!(
            limits[1]
                .contains("See enrollment_requests_per_minute in the configuration. The token")
        );
        let overloaded = about("GW_OVERLOADED").unwrap();
        let [GuidePart::Paragraph(_), GuidePart::Items(reasons)] = &overloaded[..] else {
            panic!("{overloaded:?}")
        };
        assert_eq!(reasons[1], "draining: the gateway drains");
    }
}
