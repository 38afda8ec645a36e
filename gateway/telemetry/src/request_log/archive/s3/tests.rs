use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::thread::{self, JoinHandle};

use gw_shared::identity::secret::Secret;

use super::*;

fn settings(endpoint: Option<&str>, path_style: bool) -> ArchiveSettings {
    ArchiveSettings {
        bucket: "logs".to_owned(),
        prefix: "eu".to_owned(),
        endpoint: endpoint.map(str::to_owned),
        region: "eu-west-1".to_owned(),
        access_key_id: "id".to_owned(),
        secret_key: Secret::new("secret".to_owned()),
        secret_key_file: None,
        session_token: Some(Secret::new("token".to_owned())),
        authorities: None,
        path_style,
        bytes_per_second: 1,
    }
}

#[test]
fn the_bucket_is_in_the_path_or_in_the_host() {
    let aws = "s3.eu-west-1.amazonaws.com";
    for (endpoint, path_style, expected) in [
        (None, false, format!("https://logs.{aws}/eu/a%20b")),
        (None, true, format!("https://{aws}/logs/eu/a%20b")),
        (
            Some("https://S3.example.com:443"),
            true,
            "https://s3.example.com/logs/eu/a%20b".to_owned(),
        ),
        (
            Some("http://s3.example.com:9000"),
            false,
            "http://logs.s3.example.com:9000/eu/a%20b".to_owned(),
        ),
        (
            Some("http://[::1]:80"),
            true,
            "http://[::1]/logs/eu/a%20b".to_owned(),
        ),
    ] {
        let bucket = S3Bucket::new(&settings(endpoint, path_style)).unwrap();
        let path = bucket.object(Method::GET, "a b").target();
        let url = format!("{}://{}{path}", bucket.scheme, bucket.authority);
        assert_eq!(url, expected);
    }
}

/// A bucket on a server with these answers, each for one connection. The thread returns the heads
/// of the requests.
fn bucket(answers: &'static [&'static str]) -> (S3Bucket, JoinHandle<Vec<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let answer = move |answer: &&str| {
        let (stream, _) = listener.accept().unwrap();
        let mut head = String::new();
        let mut reader = BufReader::new(&stream);
        while !head.ends_with("\r\n\r\n") {
            reader.read_line(&mut head).unwrap();
        }
        let (status, body) = answer.split_once('|').unwrap();
        let length = body.len();
        let text = format!(
            "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        (&stream).write_all(text.as_bytes()).unwrap();
        head
    };
    let server = thread::spawn(move || answers.iter().map(answer).collect());
    (
        S3Bucket::new(&settings(Some(&endpoint), true)).unwrap(),
        server,
    )
}

#[test]
fn lists_go_on_after_their_first_part() {
    let (bucket, server) = bucket(&[
        "200 OK|<ListBucketResult><IsTruncated>true</IsTruncated>\
         <NextContinuationToken>+1</NextContinuationToken>\
         <Contents><Key>eu/day/a</Key></Contents><Contents><Key>us/day/b</Key></Contents>\
         </ListBucketResult>",
        "200 OK|<ListBucketResult><Contents><Key>eu/day/c</Key></Contents></ListBucketResult>",
        "301 Moved|<Error><Code>PermanentRedirect</Code><Message>Use another \
         endpoint</Message></Error>",
    ]);
    assert_eq!(bucket.objects("day", 9).unwrap(), ["day/a", "day/c"]);
    let error = bucket.folders("day").unwrap_err().to_string();
    assert_eq!(
        error,
        "archive: cannot list day: PermanentRedirect: Use another endpoint"
    );
    let heads = server.join().unwrap();
    for (head, start) in heads.iter().zip([
        "GET /logs?list-type=2&prefix=eu%2Fday%2F HTTP/1.1\r\n",
        "GET /logs?continuation-token=%2B1&list-type=2&prefix=eu%2Fday%2F HTTP/1.1\r\n",
        "GET /logs?delimiter=%2F&list-type=2&prefix=eu%2Fday%2F HTTP/1.1\r\n",
    ]) {
        assert!(head.starts_with(start), "{head}");
        assert!(
            head.contains("\r\nx-amz-security-token: token\r\n"),
            "{head}"
        );
    }
}

#[test]
fn reads_end_in_time_and_other_requests_wait_for_longer() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let bucket = S3Bucket::new(&settings(Some(&endpoint), true)).unwrap();
    let server = thread::spawn(move || {
        // The first one gets no end of its answer.
        let (stalled, _) = listener.accept().unwrap();
        (&stalled)
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc")
            .unwrap();
        let (slow, _) = listener.accept().unwrap();
        thread::sleep(Duration::from_secs(6));
        (&slow)
            .write_all(b"HTTP/1.1 204 No Content\r\n\r\n")
            .unwrap();
        stalled
    });
    for wait in [1, 0] {
        let until = Instant::now() + Duration::from_secs(wait);
        let error = bucket.until(until).get("a", None).unwrap_err().to_string();
        let expected = "archive: cannot read a: the store has not answered in time";
        assert_eq!(error, expected);
    }
    bucket.delete("a").unwrap();
    drop(server.join().unwrap());
}

#[test]
fn a_part_of_an_object_must_be_the_requested_one() {
    let (bucket, server) = bucket(&[
        "206 Partial\r\nContent-Range: bytes 4-6/9|abc",
        "206 Partial\r\nContent-Range: bytes 0-2/9|abc",
        "200 OK|abcdefghi",
        "404 Not Found|",
        "503 Slow|busy",
    ]);
    let read = || {
        bucket
            .get("a", Some(&(4..7)))
            .map_err(|error| error.to_string())
    };
    assert_eq!(read().unwrap().unwrap(), b"abc");
    for _ in 0..2 {
        let error = read().unwrap_err();
        assert!(
            error.starts_with(
                "archive: cannot read a: bytes 4 to 7 were requested; the server answered 20"
            ),
            "{error}"
        );
    }
    assert_eq!(read().unwrap(), None);
    assert_eq!(
        read().unwrap_err(),
        "archive: cannot read a: the server answered 503 Service Unavailable: busy"
    );
    let heads = server.join().unwrap();
    assert!(
        heads
            .iter()
            .all(|head| head.contains("\r\nrange: bytes=4-6\r\n"))
    );
}
