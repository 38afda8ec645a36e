//! Answers of an S3-compatible server: lists of objects, and errors.

use http::StatusCode;
use roxmltree::{Document, Node, ParsingOptions};

/// Longest text of a server's error in a message.
const REASON_MAX: usize = 300;
/// Most elements and texts of an answer. They take more memory than their bytes; a list of 1,000
/// objects has about 30,000.
const NODES_MAX: u32 = 100_000;

/// Part of a list of objects.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Listed {
    /// Names of objects.
    pub(super) objects: Vec<String>,
    /// Common beginnings of names, up to the delimiter.
    pub(super) folders: Vec<String>,
    /// Continues the list; `None` at its end.
    pub(super) continuation: Option<String>,
}

impl Listed {
    /// Parses the answer to `ListObjectsV2`.
    pub(super) fn parse(body: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(body).map_err(|error| error.to_string())?;
        let document = document(text).map_err(|error| error.to_string())?;
        let root = document.root_element();
        if root.tag_name().name() != "ListBucketResult" {
            return Err(format!("it is a {:?}", root.tag_name().name()));
        }
        let all = |outer: &'static str, inner: &'static str| {
            let outer = elements(root, outer);
            outer.filter_map(move |node| text_of(node, inner).map(str::to_owned))
        };
        let continuation = text_of(root, "NextContinuationToken").filter(|it| !it.is_empty());
        let continuation = match text_of(root, "IsTruncated") {
            Some("true") if continuation.is_none() => {
                return Err("it is truncated and has no NextContinuationToken".to_owned());
            }
            Some("true") => continuation.map(str::to_owned),
            _ => None,
        };
        Ok(Self {
            objects: all("Contents", "Key").collect(),
            folders: all("CommonPrefixes", "Prefix").collect(),
            continuation,
        })
    }
}

/// The code and the message of a server's error. Without them the status, and the beginning of the
/// body.
pub(super) fn reason(status: StatusCode, body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let reason = match document(&text) {
        Ok(document) => {
            let of_error = |name| text_of(document.root_element(), name).map(str::trim);
            match (of_error("Code"), of_error("Message")) {
                (Some(code), Some(message)) => format!("{code}: {message}"),
                (Some(code), None) => code.to_owned(),
                _ => format!("the server answered {status}"),
            }
        }
        Err(_) if text.trim().is_empty() => format!("the server answered {status}"),
        Err(_) => format!("the server answered {status}: {}", text.trim()),
    };
    shortened(reason)
}

fn document(text: &str) -> Result<Document<'_>, roxmltree::Error> {
    let options = ParsingOptions {
        nodes_limit: NODES_MAX,
        ..ParsingOptions::default()
    };
    Document::parse_with_options(text, options)
}

/// Limits the length of a message that a server or the network brought about, and removes control
/// characters.
pub(super) fn shortened(mut reason: String) -> String {
    reason.truncate(reason.floor_char_boundary(REASON_MAX));
    reason.replace(char::is_control, " ")
}

fn elements<'a, 'input>(
    parent: Node<'a, 'input>,
    name: &'static str,
) -> impl Iterator<Item = Node<'a, 'input>> {
    parent
        .children()
        .filter(move |node| node.tag_name().name() == name)
}

fn text_of<'a>(parent: Node<'a, '_>, name: &'static str) -> Option<&'a str> {
    elements(parent, name).next()?.text()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_have_names_folders_and_a_continuation() {
        let list = br#"<?xml version="1.0" encoding="UTF-8"?>
            <ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">
              <Name>logs</Name><Prefix>a/</Prefix><IsTruncated>true</IsTruncated>
              <NextContinuationToken>1/x+=</NextContinuationToken>
              <Contents><Key>a/b &amp; c</Key><Size>3</Size></Contents>
              <Contents><Size>3</Size><Key>a/<![CDATA[<d>]]></Key></Contents>
              <CommonPrefixes><Prefix>a/2026-11-21/</Prefix></CommonPrefixes>
            </ListBucketResult>"#;
        let expected = Listed {
            objects: vec!["a/b & c".to_owned(), "a/<d>".to_owned()],
            folders: vec!["a/2026-11-21/".to_owned()],
            continuation: Some("1/x+=".to_owned()),
        };
        assert_eq!(Listed::parse(list).unwrap(), expected);
        let last = b"<ListBucketResult><NextContinuationToken>1</NextContinuationToken>\
                     </ListBucketResult>";
        assert_eq!(Listed::parse(last).unwrap(), Listed::default());
    }

    #[test]
    fn other_answers_are_no_lists() {
        for (body, expected) in [
            (&b"<html></html>"[..], "it is a \"html\""),
            (
                b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
                "it is truncated and has no NextContinuationToken",
            ),
            (b"<ListBucketResult><Contents>", "never closed"),
            (b"\xff", "invalid utf-8"),
            (
                b"<!DOCTYPE a [<!ENTITY b 'c'>]><ListBucketResult>&b;</ListBucketResult>",
                "DTD",
            ),
        ] {
            let error = Listed::parse(body).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_list_of_too_many_elements_is_refused() {
        let elements = |count| {
            format!(
                "<ListBucketResult>{}</ListBucketResult>",
                "<a/>".repeat(count)
            )
        };
        assert!(Listed::parse(elements(90_000).as_bytes()).is_ok());
        let error = Listed::parse(elements(100_000).as_bytes()).unwrap_err();
        assert!(error.contains("nodes limit"), "{error}");
    }

    #[test]
    fn errors_have_code_and_message_or_the_beginning_of_the_body() {
        let forbidden = StatusCode::FORBIDDEN;
        let error = b"<Error><Code>AccessDenied</Code><Message>Not\nyou &amp; me</Message></Error>";
        assert_eq!(reason(forbidden, error), "AccessDenied: Not you & me");
        assert_eq!(reason(forbidden, b"<Error><Code>A</Code></Error>"), "A");
        for body in ["", "<html/>"] {
            assert_eq!(
                reason(forbidden, body.as_bytes()),
                "the server answered 403 Forbidden"
            );
        }
        let long = reason(forbidden, "ü".repeat(1000).as_bytes());
        assert!(
            long.starts_with("the server answered 403 Forbidden: üü"),
            "{long}"
        );
        assert!(long.len() <= REASON_MAX);
    }
}
